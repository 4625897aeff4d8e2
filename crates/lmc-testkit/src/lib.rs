//! Helpers that the tests of several lmc crates share.
//!
//! Every wait here has a deadline that is generous on a busy machine; the panic names the condition
//! that was waited for. Not published; crates name it in `dev-dependencies` only.
//!
//! ```
//! use lmc_testkit::{Folder, until};
//!
//! let folder = Folder::temporary();
//! std::fs::write(folder.join("file"), "text")?;
//! until("the file is there", || folder.join("file").exists());
//! # Ok::<(), std::io::Error>(())
//! ```

mod cpu;
pub use cpu::cpu_time;

mod folder;
pub use folder::{Folder, write_secret};

pub mod interleave;

mod lab;
pub use lab::{in_lab, rounds};

mod memory;
pub use memory::pool;

mod own_shm;
pub use own_shm::{is_root, with_own_shm};

mod own_test;
pub use own_test::{own_test, test_arguments, test_name};

mod ports;
pub use ports::free_port;

mod process;
pub use process::Process;

mod wait;
pub use wait::{DEADLINE, soon, until};
