//! Programs that use the driver: this test program again, which finds the fake in its loader's path.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Stdio};

use lmc_fake_cuda::{Live, Machine};
use lmc_testkit::{Process, own_test};

/// Begins a line that a program writes to its test.
const MARK: &str = "to the test: ";

/// Is set for programs only.
const VARIABLE: &str = "LMC_TEST_FAKE_CUDA_PROGRAM";

/// Returns true in a program that a test has started, and false where the runner of the tests runs it.
pub(crate) fn is_program() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Writes a line to the test.
pub(crate) fn say(line: &str) {
    println!("\n{MARK}{line}");
}

/// Waits for a line of the test.
pub(crate) fn hear() -> String {
    let mut line = String::new();
    std::io::stdin()
        .read_line(&mut line)
        .expect("the test is there");
    line.trim_end().to_owned()
}

/// Returns the handle that [`hex`] has written.
pub(crate) fn handle(line: &str) -> [u8; 64] {
    let bytes = (0..64).map(|at| u8::from_str_radix(&line[2 * at..][..2], 16));
    let bytes: Result<Vec<u8>, _> = bytes.collect();
    let bytes = bytes.expect("hexadecimal digits");
    bytes.try_into().expect("64 bytes")
}

pub(crate) fn hex(handle: [u8; 64]) -> String {
    handle.map(|byte| format!("{byte:02x}")).concat()
}

/// A program that a test has started.
pub(crate) struct Program {
    pub(crate) process: Process,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    pub(crate) fn start(machine: &Machine, program: impl Fn()) -> Self {
        let mut command = own_test(program);
        command.envs(machine.envs()).env(VARIABLE, "1");
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::spawn(command);
        let (input, output) = process.pipes();
        let output = BufReader::new(output);
        Self {
            process,
            input,
            output,
        }
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("the program runs");
    }

    /// Waits for the next line of the program.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).expect("UTF-8");
            assert!(read > 0, "the program has ended; {:#?}", self.process.log());
            if let Some(line) = line.trim_end().strip_prefix(MARK) {
                return line.to_owned();
            }
        }
    }

    /// Waits until the program has ended well, and asserts that it gave everything back.
    pub(crate) fn end(mut self, machine: &Machine) {
        let pid = self.process.id();
        let status = self.process.wait();
        assert!(status.success(), "{status}; {:#?}", self.process.log());
        assert_eq!(machine.live(pid), Live::default());
    }
}
