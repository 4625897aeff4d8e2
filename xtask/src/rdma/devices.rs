//! Devices of the machine: RDMA devices, their counters, GPUs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const DEVICES: &str = "/sys/class/infiniband";
const GPUS: &str = "/proc/driver/nvidia/gpus";
/// Payload of a packet at most, in bytes: the largest MTU of InfiniBand and RoCE.
const MTU: u64 = 4096;

/// A port of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Port {
    device: String,
    number: String,
    /// `4: ACTIVE`
    state: String,
    /// `InfiniBand` or `Ethernet`
    layer: String,
}

impl Port {
    /// Name of the device, as UCX has it.
    pub(crate) fn name(&self) -> String {
        format!("{}:{}", self.device, self.number)
    }

    pub(crate) fn is_active(&self) -> bool {
        self.state.contains("ACTIVE")
    }

    fn folder(&self) -> PathBuf {
        Path::new(DEVICES)
            .join(&self.device)
            .join("ports")
            .join(&self.number)
    }

    /// Reads all counters of the device.
    pub(crate) fn counters(&self) -> PortCounters {
        let mut counters = PortCounters::default();
        for kind in ["counters", "hw_counters"] {
            for name in names(&self.folder().join(kind)) {
                let path = self.folder().join(kind).join(&name);
                if let Ok(value) = text(&path).parse() {
                    counters.0.insert(name, value);
                }
            }
        }
        counters
    }

    /// Describes the device for people.
    pub(crate) fn described(&self) -> String {
        format!("{} ({}, {})", self.name(), self.layer, self.state)
    }
}

/// Counters of a port by their names in sysfs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PortCounters(pub(crate) BTreeMap<String, u64>);

impl PortCounters {
    /// Returns by how much a counter moved; 0 where there is none of that name.
    fn moved(&self, before: &Self, name: &str) -> u64 {
        let at = |counters: &Self| counters.0.get(name).copied().unwrap_or_default();
        at(self).saturating_sub(at(before))
    }

    /// Describes how payload of so many bytes, out and in, shows since `before`; `None` if it does not.
    pub(crate) fn carried(&self, before: &Self, (out, into): (u64, u64)) -> Option<String> {
        // Soft-RoCE's names, then those of other drivers, without packets that are looped back
        // inside the device.
        let pairs = [
            ("sent_pkts", "rcvd_pkts"),
            ("port_xmit_packets", "port_rcv_packets"),
        ];
        for (sent, received) in pairs {
            let packets = (self.moved(before, sent), self.moved(before, received));
            let enough = packets.0 >= out / MTU && packets.1 >= into / MTU;
            if packets.0 > 0 && packets.1 > 0 && enough {
                return Some(format!(
                    "{sent} moved by {}, {received} by {}",
                    packets.0, packets.1
                ));
            }
        }
        // Devices that do loop packets back count requests.
        let requests = ["rx_write_requests", "rx_read_requests"];
        let moved = requests.map(|name| self.moved(before, name));
        (moved[0] > 0 && moved[1] > 0).then(|| {
            let [write, read] = requests;
            format!("{write} moved by {}, {read} by {}", moved[0], moved[1])
        })
    }
}

/// Ports of all RDMA devices.
pub(crate) fn ports() -> Vec<Port> {
    let mut ports = Vec::new();
    for device in names(Path::new(DEVICES)) {
        let folder = Path::new(DEVICES).join(&device).join("ports");
        for number in names(&folder) {
            let port = folder.join(&number);
            ports.push(Port {
                device: device.clone(),
                number,
                state: text(&port.join("state")),
                layer: text(&port.join("link_layer")),
            });
        }
    }
    ports
}

/// GPUs, as their driver describes them.
pub(crate) fn gpus() -> Vec<String> {
    let model = |name: &String| {
        let information = text(&Path::new(GPUS).join(name).join("information"));
        let model = information
            .lines()
            .find_map(|line| line.strip_prefix("Model:"));
        let model = model.unwrap_or("an NVIDIA GPU").trim();
        format!("{model} at {name}")
    };
    names(Path::new(GPUS)).iter().map(model).collect()
}

/// Names in a folder, in order; none where there is no such folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn text(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(pairs: &[(&str, u64)]) -> PortCounters {
        PortCounters(
            pairs
                .iter()
                .map(|&(name, value)| (name.to_owned(), value))
                .collect(),
        )
    }

    #[test]
    fn a_few_packets_do_not_carry_much() {
        let before = counters(&[
            ("sent_pkts", 10),
            ("rcvd_pkts", 7),
            ("port_xmit_packets", 5),
        ]);
        let after = counters(&[
            ("sent_pkts", 20),
            ("rcvd_pkts", 8),
            ("port_xmit_packets", 5),
        ]);
        assert!(after.carried(&before, (40_960, 4096)).is_some());
        assert!(after.carried(&before, (1 << 20, 4096)).is_none());
        assert!(after.carried(&before, (40_960, 1 << 20)).is_none());
        assert!(before.carried(&before, (0, 0)).is_none(), "nothing moved");
        let requests = counters(&[("rx_write_requests", 7), ("rx_read_requests", 1)]);
        assert!(requests.carried(&before, (1 << 30, 0)).is_some());
    }
}
