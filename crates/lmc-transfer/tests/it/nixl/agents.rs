//! Agents that are no channels of ours: of this process, and of NIXL's Python package.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use lmc_transfer::conformance::check_value;
use lmc_transfer::{
    ConnectError, Index, NixlAgent, NixlMemory, PeerId, TransferChannel, TransferError, block_on,
};

use crate::nixl::scenarios::{NixlSide, TIMEOUT, eventually};
use crate::support::nixl::NixlRig;

fn forget(side: &NixlSide, peer: &PeerId) {
    let deadline = Instant::now() + TIMEOUT;
    block_on(side.channel.disconnect(peer, deadline)).expect("it is quick");
    eventually("it is forgotten", || !side.channel.is_connected(peer));
}

/// No two peers have one agent, and one that NIXL refuses is no hindrance to the right one.
pub(crate) fn agents() {
    let rig = NixlRig::new();
    let (a, b) = (NixlSide::new(&rig, "a"), NixlSide::new(&rig, "b"));
    let whole = b.channel.agent().expect("its memory is registered");
    let introduce = |name: &str, agent: &NixlAgent| {
        let id: PeerId = name.parse().expect("a name");
        block_on(a.channel.introduce(id, agent.clone(), 4096))
    };
    let (p, q): (PeerId, PeerId) = ("p".parse().expect("a name"), "q".parse().expect("a name"));
    introduce("p", &whole).expect("NIXL takes it");
    let taken = introduce("q", &whole);
    assert!(matches!(taken, Err(ConnectError::Refused(_))), "{taken:?}");
    assert!(!a.channel.is_connected(&q));
    forget(&a, &p);
    // One that NIXL refuses after it has learnt how to connect: it would refuse the right one as
    // well from then on.
    let object = b.objects(1, &[100_000]);
    let unit = object[0].offset() / 4096;
    for _ in 0..3 {
        let refused = introduce("p", &doubled(&whole));
        let Err(ConnectError::Library(why)) = refused else {
            panic!("{refused:?}");
        };
        assert!(why.contains("NIXL refuses"), "{why}");
        let mut incarnation = None;
        eventually("it is taken by another agent", || {
            incarnation = introduce("p", &whole).ok();
            incarnation.is_some()
        });
        let index = [Index::arena(incarnation.expect("just checked"), unit)];
        let deadline = Instant::now() + TIMEOUT;
        let reading = a.channel.read(a.slots(&[100_000]), &p, &index, deadline);
        let slots = block_on(reading).into_result().expect("it is there");
        check_value(1, 0, slots[0].bytes()).expect("the object");
        forget(&a, &p);
    }
    drop(object);
    a.connect(&b);
    a.works_with(1, &b);
    for side in [a, b] {
        let closed = block_on(side.channel.close(Instant::now() + TIMEOUT));
        closed.expect("nothing is under way");
    }
}

/// The description with its only region twice, reached in two ways.
fn doubled(agent: &NixlAgent) -> NixlAgent {
    let mut agent = agent.clone();
    let tag = b"|n\x08\0\0\0\0\0\0\0\x01";
    let at = agent.metadata.windows(tag.len()).rposition(|at| at == tag);
    let number = at.expect("the number of regions") + tag.len() - 1;
    agent.metadata[number] = 2;
    let mut region = agent.metadata[number + 9..].to_vec();
    // The device of the second.
    region[0] += 1;
    region.insert(region.len() - 1, 0xff);
    agent.metadata.extend(region);
    agent
}

/// An agent of NIXL's own Python package reads this side's memory and writes to it, and this side
/// reads its memory and writes to that.
pub(crate) fn python() {
    let Some(python) = env::var_os("LMC_NIXL_PYTHON") else {
        println!(
            "skipped: LMC_NIXL_PYTHON names no Python with NIXL; `cargo xtask test-nixl` does"
        );
        return;
    };
    let rig = NixlRig::new();
    let side = NixlSide::new(&rig, "me");
    let object = side.objects(1, &[100_000]);
    let mut target = vec![side.slot(100_000)];
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/nixl/agent.py");
    let mut child = Command::new(python)
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python can be run");
    let mut input = child.stdin.take().expect("it is piped");
    let mut output = BufReader::new(child.stdout.take().expect("it is piped"));
    let mut says = || {
        let mut line = String::new();
        output.read_line(&mut line).expect("its output");
        line.trim().to_owned()
    };

    // Its agent, to us.
    let said = says();
    let fields: Vec<&str> = said.split(' ').collect();
    let [name, base, len, metadata] = fields[..] else {
        panic!("{said:?}");
    };
    let agent = NixlAgent {
        agent: name.to_owned(),
        metadata: from_hex(metadata),
        base: base.parse().expect("an address"),
        len: len.parse().expect("a length"),
        memory: NixlMemory::Host,
    };
    let id: PeerId = "python".parse().expect("a name");
    let introduced = side.channel.introduce(id.clone(), agent, 1);
    let incarnation = block_on(introduced).expect("NIXL takes it");
    let at_byte = |byte| Index::arena(incarnation, byte);

    // Ours, to it, with the addresses of the object and the slot.
    let ours = side.channel.agent().expect("its memory is registered");
    let at = |offset: u64| ours.base + offset;
    writeln!(
        input,
        "{} {} {} {}",
        ours.agent,
        at(object[0].offset()),
        at(target[0].offset()),
        to_hex(&ours.metadata)
    )
    .expect("it listens");

    // It has read our object into its first 100,000 bytes, and written its next to our slot.
    assert_eq!(says(), "moved");
    let deadline = || Instant::now() + TIMEOUT;
    let from = [at_byte(0), at_byte(100_000)];
    let reading = side
        .channel
        .read(side.slots(&[100_000, 5]), &id, &from, deadline());
    let slots = block_on(reading).into_result().expect("it is there");
    check_value(1, 0, slots[0].bytes()).expect("what it read of us");
    assert_eq!(slots[1].bytes(), [0, 7, 14, 21, 28]);
    let written = target.remove(0).written();
    for (at, byte) in written.bytes().iter().enumerate() {
        assert_eq!(*byte, (at * 7 % 251) as u8, "byte {at}");
    }
    // And we write to it.
    let objects = side.objects(3, &[50_000]);
    let copy = objects[0].bytes().to_vec();
    let sent = block_on(side.channel.write(objects, &id, &[at_byte(3)], deadline()));
    assert_eq!(sent.into_result(), Ok(1));
    writeln!(input, "{}", to_hex(&copy)).expect("it listens");
    assert_eq!(says(), "right");

    // There is no conversation with it, and it can be forgotten.
    let sent = block_on(side.channel.send(object.clone(), &id, 1, deadline()));
    assert!(
        matches!(sent.error, Some(TransferError::Refused(_))),
        "{sent:?}"
    );
    forget(&side, &id);
    drop(input);
    let status = child.wait().expect("it is our child");
    assert!(status.success(), "{status}");
    drop((object, target, slots, written));
    // The arena stays: its address is known to whom we cannot ask.
    let closed = block_on(side.channel.close(deadline()));
    closed.expect("nothing is under way");
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
    (0..text.len()).step_by(2).map(byte).collect()
}
