//! Variables that Kubernetes sets in every pod for each Service of its namespace, in the form of
//! Docker's links: a Service `lmc-http` gives `LMC_HTTP_PORT=tcp://10.0.0.1:8080` and other variables.
//! Some of them have the names of settings.

use std::collections::BTreeSet;

/// Services whose variables begin with `LMC`, as the prefixes of their variables.
#[derive(Debug)]
pub(super) struct Services(BTreeSet<String>);

impl Services {
    /// Finds the Services by the variables.
    pub(super) fn of(variables: &[(String, String)]) -> Self {
        let found = variables.iter().filter_map(|(name, value)| {
            let start = name.strip_suffix("_SERVICE_HOST");
            start.or_else(|| name.strip_suffix("_PORT").filter(|_| is_link(value)))
        });
        Self(found.map(str::to_owned).collect())
    }

    /// Returns true if Kubernetes has set this variable. The pod itself may set a variable with the name of a
    /// setting, so such a variable counts only if its value looks like a service link.
    pub(super) fn wrote(&self, name: &str, value: &str) -> bool {
        let of_service = |start: &String| {
            let Some(rest) = name.strip_prefix(start.as_str()) else {
                return false;
            };
            match rest {
                "_PORT" => is_link(value),
                "_SERVICE_HOST" | "_SERVICE_PORT" => true,
                _ => rest.starts_with("_SERVICE_PORT_") || is_port(rest),
            }
        };
        self.0.iter().any(of_service)
    }

    /// Returns the log line about the ignored variables.
    pub(super) fn note(&self) -> Option<String> {
        let names: Vec<String> = self.0.iter().map(|start| name_of(start)).collect();
        (!names.is_empty()).then(|| {
            format!(
                "variables that Kubernetes sets for Services were ignored: {}; set enableServiceLinks: \
                 false in the pod to avoid them",
                names.join(", ")
            )
        })
    }
}

/// The name of a Service, quoted: its variables have underscores for dashes.
fn name_of(start: &str) -> String {
    format!("{:?}", start.to_lowercase().replace('_', "-"))
}

fn is_link(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"]
        .iter()
        .any(|scheme| value.starts_with(scheme))
}

/// Returns true for `_PORT_5555_TCP` and the names derived from it.
fn is_port(rest: &str) -> bool {
    let mut parts = rest.strip_prefix("_PORT_").unwrap_or_default().split('_');
    let is_number = parts.next().is_some_and(|port| port.parse::<u16>().is_ok());
    let is_protocol = matches!(parts.next(), Some("TCP" | "UDP" | "SCTP"));
    let is_known = matches!(parts.next(), None | Some("PROTO" | "PORT" | "ADDR"));
    is_number && is_protocol && is_known && parts.next().is_none()
}
