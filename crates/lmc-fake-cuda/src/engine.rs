//! The engine's side in the process of a test.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::driver::{Driver, Event};
use crate::shared::Kind;
use crate::stream::{Stream, Work};
use crate::{Code, Machine};

/// `CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS`.
const SHARED_EVENT: u32 = 6;

/// An engine with a context on one device and one stream, in the process of a test. The driver
/// treats it as a process of its own, so a program under test in the same process can open its
/// memory. Dropping it frees everything, as the end of an engine does.
#[derive(Debug)]
pub struct Engine {
    driver: Arc<Driver>,
    device: usize,
    stream: Arc<Stream>,
}

/// An event of an engine, which is destroyed on drop.
#[derive(Debug)]
pub struct EngineEvent {
    driver: Arc<Driver>,
    device: usize,
    number: usize,
    event: Arc<Event>,
}

/// Stops an engine's stream until it is dropped.
#[derive(Debug)]
pub struct Stall {
    driver: Arc<Driver>,
    over: Arc<AtomicBool>,
}

impl Engine {
    /// Starts an engine on a device of a machine.
    ///
    /// # Panics
    /// If the machine does not have that device.
    pub fn new(machine: &Machine, device: usize) -> Self {
        assert!(device < machine.devices(), "no device {device}");
        let driver = Driver::open(machine.folder(), machine.devices(), 0);
        let driver = driver.expect("the machine's folder can be written");
        driver.retain(device).expect("a driver without a fault");
        let number = driver.create_stream(device, 1).expect("a new context");
        let stream = driver.stream(device, number).expect("a new stream");
        Self {
            driver,
            device,
            stream,
        }
    }

    /// Allocates device memory with the given bytes, and returns its address.
    ///
    /// # Panics
    /// If `bytes` is empty.
    pub fn allocate(&self, bytes: &[u8]) -> usize {
        let address = self.driver.allocate(self.device, bytes.len());
        let address = address.expect("device memory");
        self.write(address, bytes);
        address
    }

    /// Frees device memory. Processes that have mapped it still read it.
    ///
    /// # Panics
    /// If no allocation begins at the address.
    pub fn free(&self, address: usize) {
        let missing = Code::INVALID_VALUE;
        let free = self.driver.remove(Kind::Allocation, address, missing);
        free.expect("an allocation begins there");
    }

    /// Returns bytes of device memory as they are at this moment.
    ///
    /// # Panics
    /// If the bytes are not in one allocation.
    pub fn read(&self, address: usize, len: usize) -> Vec<u8> {
        let bytes = self.driver.read(address, len);
        bytes.expect("the bytes are in one allocation")
    }

    /// Changes bytes of device memory at once, whatever the stream is doing.
    ///
    /// # Panics
    /// If the bytes are not in one allocation.
    pub fn write(&self, address: usize, bytes: &[u8]) {
        let written = self.driver.write(address, bytes);
        written.expect("the bytes are in one allocation");
    }

    /// Changes bytes of device memory when the stream reaches this work.
    pub fn write_later(&self, address: usize, bytes: &[u8]) {
        let (to, bytes) = (address, bytes.to_vec());
        self.stream.give(&self.driver, Work::Write { to, bytes });
    }

    /// Returns the handle of the allocation that contains an address, and the offset in it.
    ///
    /// # Panics
    /// If no allocation contains the address.
    pub fn handle(&self, address: usize) -> ([u8; 64], usize) {
        let handle = self.driver.memory_handle(address);
        let memory = self.driver.memory.read();
        let range = memory.device(address, 1).expect("device memory");
        (handle.expect("device memory"), address - range.start)
    }

    /// Makes an event that other processes can open, and records it in the stream.
    pub fn record(&self) -> EngineEvent {
        let event = self.event();
        event.record(self);
        event
    }

    /// Makes an event that other processes can open. It is ready until it is recorded.
    pub fn event(&self) -> EngineEvent {
        let number = self.driver.create_event(self.device, SHARED_EVENT);
        self.engine_event(number.expect("a context"))
    }

    /// Opens the event of another process.
    ///
    /// # Panics
    /// If the handle is not that of an event.
    pub fn open_event(&self, handle: &[u8; 64]) -> EngineEvent {
        let number = self.driver.open_event(self.device, handle);
        self.engine_event(number.expect("the handle of an event"))
    }

    fn engine_event(&self, number: usize) -> EngineEvent {
        EngineEvent {
            driver: Arc::clone(&self.driver),
            device: self.device,
            number,
            event: self.driver.event(self.device, number).expect("it is new"),
        }
    }

    /// Stops the stream once it has done the work that it was given so far. Work that is given from
    /// now on, including records of events, waits until the result is dropped.
    pub fn stall(&self) -> Stall {
        let over = Arc::new(AtomicBool::new(false));
        let work = Work::Stall(Arc::clone(&over));
        self.stream.give(&self.driver, work);
        Stall {
            driver: Arc::clone(&self.driver),
            over,
        }
    }

    /// Waits until the stream has done its work.
    ///
    /// # Panics
    /// If the context has had a fault.
    pub fn synchronize(&self) {
        let done = self.stream.wait_for_all(&self.driver);
        done.expect("the context has no fault");
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.driver.release(self.device);
    }
}

impl EngineEvent {
    /// Records the event in a stream: it is not ready until the stream has done the work that it
    /// was given so far.
    pub fn record(&self, engine: &Engine) {
        let event = Arc::clone(&self.event);
        engine.driver.record(event, &engine.stream);
    }

    /// Makes the engine's stream wait for the latest record.
    pub fn wait_in(&self, engine: &Engine) {
        let event = Arc::clone(&self.event);
        engine.driver.wait_event(event, &engine.stream);
    }

    /// Returns true unless the latest record has not been reached yet.
    pub fn is_ready(&self) -> bool {
        self.event.is_ready()
    }

    /// Returns the handle by which other processes open the event.
    ///
    /// # Panics
    /// If the event itself was opened by a handle.
    pub fn handle(&self) -> [u8; 64] {
        let handle = self.driver.event_handle(self.device, self.number);
        handle.expect("an event of this engine")
    }
}

impl Drop for EngineEvent {
    fn drop(&mut self) {
        let _ = self.driver.destroy_event(self.device, self.number);
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        self.driver.control.changed();
    }
}
