//! A CUDA driver without a GPU, for tests: `libcuda.so` over memory of the host that processes
//! share.
//!
//! Built as a library for C, the crate has the functions of the driver API that lmc calls. A
//! program finds it as `libcuda.so` in the path of the loader. Devices belong to a [`Machine`],
//! which is a folder: all processes that use the folder see the same devices. An [`Engine`] plays
//! the engine in the process of the test. README.md lists what tests may rely on.
//!
//! The fake computes nothing, and copies at the speed of the host: it says nothing about speed.
//!
//! ```
//! use lmc_fake_cuda::{Engine, Machine};
//!
//! let machine = Machine::new();
//! let engine = Engine::new(&machine, 0);
//! let keys = engine.allocate(&[7; 4096]);
//! let (handle, offset) = engine.handle(keys + 512);
//! assert_eq!((handle.len(), offset), (64, 512));
//!
//! let stall = engine.stall();
//! engine.write_later(keys, &[8; 16]);
//! let event = engine.record();
//! assert!(!event.is_ready());
//! drop(stall);
//! engine.synchronize();
//! assert!(event.is_ready());
//! assert_eq!(engine.read(keys, 16), [8; 16]);
//! ```

mod abi;

mod code;
pub use code::Code;

mod driver;

mod engine;
pub use engine::{Engine, EngineEvent, Stall};

mod ipc;

mod machine;
pub use machine::{Live, Machine, Process};

mod memory;

mod shared;

mod stream;

/// Ids of the devices of a machine, spelled as PyTorch does.
pub const UUIDS: [&str; 2] = [
    "6c6d632d-6661-6b65-2d63-7564612d2d30",
    "6c6d632d-6661-6b65-2d63-7564612d2d31",
];

/// The variable that names the folder of the machine.
const FOLDER_VARIABLE: &str = "FAKE_CUDA";
/// The variable that has the number of devices.
const DEVICES_VARIABLE: &str = "FAKE_CUDA_DEVICES";
