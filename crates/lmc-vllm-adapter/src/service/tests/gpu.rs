//! Workers whose memory lies on a GPU, with the driver of `lmc-fake-cuda`.

use std::thread;

use lmc_fake_cuda::{Engine, EngineEvent, Live, Machine, UUIDS};
use lmc_testkit::{own_test, until};

use super::*;
use crate::protocol::{Cuda, GpuEvent, SharedBy};

/// Bytes of the allocation before the tensor.
const OFFSET: usize = 48;

/// As [`Memory`], on a GPU.
struct GpuMemory {
    engine: Engine,
    address: usize,
}

impl GpuMemory {
    fn new(machine: &Machine) -> Self {
        let engine = Engine::new(machine, 0);
        let address = engine.allocate(&vec![0; OFFSET + (BLOCKS * BLOCK_BYTES) as usize]);
        Self { engine, address }
    }

    fn tensor(&self) -> Cuda {
        let (handle, offset) = self.engine.handle(self.address + OFFSET);
        let KvDescriptor::CpuShm(shm) = &Memory::new().registration().kv_caches[0] else {
            panic!("a tensor in shared memory");
        };
        Cuda {
            device_uuid: UUIDS[0].to_owned(),
            handle,
            offset: offset as u64,
            nbytes: BLOCKS * BLOCK_BYTES,
            shared_by: SharedBy::PyTorch { counter: None },
            tensor: shm.tensor.clone(),
        }
    }

    fn registration(&self) -> RegisterKvCache {
        registration(&[self.tensor()])
    }

    fn register(&self, service: &Service) {
        let request = Request::RegisterKvCache(Box::new(self.registration()));
        assert_eq!(reply(service, 1, request), Reply::None);
    }

    fn address_of(&self, block: u64) -> usize {
        self.address + OFFSET + (block * BLOCK_BYTES) as usize
    }

    fn block(&self, block: u64) -> Vec<u8> {
        self.engine
            .read(self.address_of(block), BLOCK_BYTES as usize)
    }

    /// Writes the blocks of [`store`] when the GPU comes to it.
    fn write_later(&self, byte: u8) -> EngineEvent {
        let bytes = vec![byte; 2 * BLOCK_BYTES as usize];
        self.engine.write_later(self.address_of(3), &bytes);
        self.engine.record()
    }
}

/// A registration of these tensors, a layer each.
fn registration(tensors: &[Cuda]) -> RegisterKvCache {
    let tensor = |tensor: &Cuda| KvDescriptor::Cuda(Box::new(tensor.clone()));
    let mut registration = Memory::new().registration();
    registration.kv_caches = tensors.iter().map(tensor).collect();
    registration.groups[0].layer_indices = (0..tensors.len() as u32).collect();
    registration
}

fn after(mut request: Request, handle: &[u8]) -> Request {
    if let Request::Store { event, .. } | Request::Retrieve { event, .. } = &mut request {
        *event = handle.to_vec();
    }
    request
}

fn unregister(service: &Service) {
    let request = Request::Unregister {
        instance_id: 1,
        engine_driven: false,
    };
    assert_eq!(reply(service, 1, request), Reply::None);
}

fn assert_given_back(machine: &Machine) {
    until("everything is given back", || {
        machine.live(std::process::id()) == Live::default()
    });
}

/// The numbers by which an engine in a container of its own counts its work.
struct Counts<'a> {
    engine: &'a Engine,
    address: usize,
}

impl<'a> Counts<'a> {
    const BYTES: usize = 32 << 10;

    fn new(engine: &'a Engine) -> Self {
        let address = engine.allocate(&[0; Self::BYTES]);
        Self { engine, address }
    }

    /// The point after what the engine's stream has been given so far.
    fn record(&self, number: usize, least: u64) -> GpuEvent {
        let at = self.address + 8 * number;
        self.engine.write_later(at, &least.to_ne_bytes());
        self.point(8 * number as u64, least)
    }

    fn point(&self, offset: u64, least: u64) -> GpuEvent {
        let (handle, _) = self.engine.handle(self.address);
        GpuEvent::Count {
            handle,
            offset,
            least,
        }
    }
}

/// Waits until a job on another thread asks the driver about work that is not done.
fn until_it_waits(machine: &Machine, job: &thread::ScopedJoinHandle<'_, Reply>) {
    let asked = || machine.calls("cuEventQuery") + machine.calls("cuStreamQuery");
    let before = asked();
    until("the job waits for the GPU", || {
        job.is_finished() || asked() > before + 300
    });
    assert!(!job.is_finished(), "it did not wait for the GPU");
}

#[test]
fn copies_come_after_the_events_of_their_requests() {
    let test = own_test(copies_come_after_the_events_of_their_requests);
    Machine::in_own_process(1, test, |machine| {
        let (service, memory) = (service(|_| {}), GpuMemory::new(machine));
        memory.register(&service);
        let stall = memory.engine.stall();
        let written = memory.write_later(7);
        let job = job(&service, after(store(1), &written.handle()), Instant::now());
        thread::scope(|scope| {
            let storing = scope.spawn(|| job.run());
            until_it_waits(machine, &storing);
            drop(stall);
            assert_eq!(storing.join().expect("it ends"), Reply::Transferred(true));
        });
        // The engine's own write comes first.
        let stall = memory.engine.stall();
        let bytes = vec![9; 2 * BLOCK_BYTES as usize];
        memory.engine.write_later(memory.address_of(5), &bytes);
        let written = memory.engine.record();
        let request = after(retrieve(1), &written.handle());
        let job = super::job(&service, request, Instant::now());
        thread::scope(|scope| {
            let retrieving = scope.spawn(|| job.run());
            until_it_waits(machine, &retrieving);
            drop(stall);
            let answer = retrieving.join().expect("it ends");
            assert_eq!(answer, Reply::Transferred(true));
        });
        for block in [5, 6] {
            assert_eq!(memory.block(block), vec![7; BLOCK_BYTES as usize]);
        }
        unregister(&service);
        assert_given_back(machine);
    });
}

#[test]
fn an_event_that_cannot_be_opened_fails_its_request_only() {
    let test = own_test(an_event_that_cannot_be_opened_fails_its_request_only);
    Machine::in_own_process(1, test, |machine| {
        let (service, memory) = (service(|_| {}), GpuMemory::new(machine));
        memory.register(&service);
        let written = memory.write_later(7).handle();
        for handle in [
            &[][..],
            &written[..63],
            &[written, written].concat(),
            &[0x5a; 64],
        ] {
            for request in [store(1), retrieve(1)] {
                let refused = reply(&service, 1, after(request, handle));
                assert_eq!(refused, Reply::Transferred(false));
            }
        }
        assert_eq!(found(&service, 1, "b", 2), Reply::Int(0));
        let written = memory.write_later(7);
        let store = after(store(1), &written.handle());
        assert_eq!(reply(&service, 1, store), Reply::Transferred(true));
        let refused = reply(&service, 1, after(retrieve(1), &[0x5a; 64]));
        assert_eq!(refused, Reply::Transferred(false));
        unregister(&service);
        assert_given_back(machine);
    });
}

/// As LMCache's client with `lmcache.mp.isolated_ipc`.
#[test]
fn an_engine_that_shares_nothing_but_its_gpu_is_served() {
    let test = own_test(an_engine_that_shares_nothing_but_its_gpu_is_served);
    Machine::in_own_process(1, test, |machine| {
        let memory = GpuMemory::new(machine);
        let mut tensor = memory.tensor();
        tensor.shared_by = SharedBy::Driver;
        let request = Request::RegisterKvCache(Box::new(registration(&[tensor])));
        let strict = service(|_| {});
        strict.connected(client(1), ClientSocket::default());
        let refused = reply(&strict, 1, request.clone());
        assert!(matches!(&refused, Reply::Error(_)), "{refused:?}");
        let service = service(|config| config.isolated_ipc = true);
        service.connected(client(1), ClientSocket::default());
        // Shared by PyTorch, which needs more than a GPU in common; and for another user.
        let of_pytorch = Request::RegisterKvCache(Box::new(memory.registration()));
        let refused = reply(&service, 1, of_pytorch);
        assert!(matches!(&refused, Reply::Error(_)), "{refused:?}");
        service.connected(client(20), peer(own_uid() + 1));
        let refused = reply(&service, 20, request.clone());
        assert!(matches!(&refused, Reply::Error(_)), "{refused:?}");
        assert_eq!(reply(&service, 1, request), Reply::None);
        let counts = Counts::new(&memory.engine);
        let transferred =
            |request, event: GpuEvent| reply(&service, 1, after(request, &event.encode()));
        let stall = memory.engine.stall();
        let bytes = vec![7; 2 * BLOCK_BYTES as usize];
        memory.engine.write_later(memory.address_of(3), &bytes);
        let written = counts.record(1, 1);
        let store = after(store(1), &written.encode());
        let job = job(&service, store, Instant::now());
        thread::scope(|scope| {
            let storing = scope.spawn(|| job.run());
            until_it_waits(machine, &storing);
            drop(stall);
            assert_eq!(storing.join().expect("it ends"), Reply::Transferred(true));
        });
        assert_eq!(transferred(retrieve(1), written), Reply::Transferred(true));
        for block in [5, 6] {
            assert_eq!(memory.block(block), vec![7; BLOCK_BYTES as usize]);
        }
        // A number that has gone on, and a point before any work.
        counts.record(1, 9);
        memory.engine.synchronize();
        assert_eq!(transferred(retrieve(1), written), Reply::Transferred(true));
        let before = counts.point(0, 0);
        assert_eq!(transferred(retrieve(1), before), Reply::Transferred(true));
        let (end, never) = (Counts::BYTES as u64, u64::MAX);
        for bad in [end, end - 4, never - 7] {
            let refused = transferred(retrieve(1), counts.point(bad, 1));
            assert_eq!(refused, Reply::Transferred(false), "offset {bad}");
        }
        let unknown = GpuEvent::Count {
            handle: [0x5a; 64],
            offset: 8,
            least: 1,
        };
        let refused = transferred(retrieve(1), unknown);
        assert_eq!(refused, Reply::Transferred(false));
        unregister(&service);
        assert_given_back(machine);
    });
}

/// An engine whose work never ends, as in a collective that hangs, may still answer pings.
#[test]
fn an_event_that_is_never_reached_keeps_no_thread() {
    let test = own_test(an_event_that_is_never_reached_keeps_no_thread);
    Machine::in_own_process(1, test, |machine| {
        let service = service(|config| config.copy_deadline = Duration::from_millis(200));
        let memory = GpuMemory::new(machine);
        memory.register(&service);
        let counts = Counts::new(&memory.engine);
        let _stall = memory.engine.stall();
        let never = memory.write_later(7);
        for never in [never.handle().to_vec(), counts.record(1, 1).encode()] {
            let job = job(&service, after(store(1), &never), Instant::now());
            thread::scope(|scope| {
                let storing = scope.spawn(|| job.run());
                until("the store is given up", || {
                    let instance_id = Some(1);
                    assert_eq!(
                        reply(&service, 1, Request::Ping { instance_id }),
                        Reply::Bool(true)
                    );
                    storing.is_finished()
                });
                assert_eq!(storing.join().expect("it ends"), Reply::Transferred(false));
            });
        }
        assert_eq!(found(&service, 1, "b", 2), Reply::Int(0));
        unregister(&service);
        assert_given_back(machine);
    });
}

/// Stores of an engine whose work takes long wait in threads of their own.
#[test]
fn stores_that_wait_for_a_gpu_hold_up_no_worker_in_host_memory() {
    let test = own_test(stores_that_wait_for_a_gpu_hold_up_no_worker_in_host_memory);
    Machine::in_own_process(1, test, |machine| {
        let service = service(|config| config.transfer_threads = 1);
        let (memory, host) = (GpuMemory::new(machine), Memory::new());
        memory.register(&service);
        let mut of_host = host.registration();
        of_host.instance_id = 2;
        let request = Request::RegisterKvCache(Box::new(of_host));
        assert_eq!(reply(&service, 1, request), Reply::None);
        let stall = memory.engine.stall();
        let written = memory.write_later(7);
        let (sender, answers) = std::sync::mpsc::channel();
        for request in [after(store(1), &written.handle()), store(2)] {
            let job = job(&service, request, Instant::now());
            let (lane, sender) = (job.lane, sender.clone());
            let work = move || sender.send((lane, job.run())).expect("it is awaited");
            service.run_job(client(1), lane, Box::new(work));
        }
        let next = || answers.recv_timeout(lmc_testkit::DEADLINE);
        assert_eq!(next(), Ok((Lane::Store, Reply::Transferred(true))));
        drop(stall);
        assert_eq!(next(), Ok((Lane::GpuStore, Reply::Transferred(true))));
        unregister(&service);
        assert_given_back(machine);
    });
}

#[test]
fn a_registration_that_fails_leaves_nothing() {
    let test = own_test(a_registration_that_fails_leaves_nothing);
    Machine::in_own_process(2, test, |machine| {
        let (service, memory) = (service(|_| {}), GpuMemory::new(machine));
        let good = memory.tensor();
        let second = |change: fn(&mut Cuda)| {
            let mut tensor = good.clone();
            change(&mut tensor);
            registration(&[good.clone(), tensor])
        };
        let mut mixed = registration(&[good.clone(), good.clone()]);
        mixed.kv_caches[1] = Memory::new().registration().kv_caches[0].clone();
        let refused = [
            second(|tensor| tensor.handle = [0x5a; 64]),
            second(|tensor| tensor.offset += 1),
            second(|tensor| tensor.offset = u64::MAX),
            second(|tensor| tensor.nbytes = u64::MAX),
            second(|tensor| tensor.device_uuid = UUIDS[1].to_owned()),
            second(|tensor| tensor.device_uuid = "none".to_owned()),
            second(|tensor| tensor.tensor.storage_offset = 1),
            registration(&vec![good.clone(); 1025]),
            mixed,
        ];
        for (number, registration) in refused.into_iter().enumerate() {
            let request = Request::RegisterKvCache(Box::new(registration));
            let answer = reply(&service, 1, request);
            assert!(matches!(answer, Reply::Error(_)), "{number}: {answer:?}");
            assert_given_back(machine);
        }
        service.connected(client(20), peer(own_uid() + 1));
        let request = Request::RegisterKvCache(Box::new(memory.registration()));
        let before = machine.calls("cuInit");
        assert!(matches!(reply(&service, 20, request), Reply::Error(_)));
        assert_eq!(machine.calls("cuInit"), before, "for another user");
        memory.register(&service);
        unregister(&service);
        assert_given_back(machine);
    });
}

/// Returns whether the connection of a worker is there; `None` without such a worker.
fn connected(service: &Service, instance_id: u64) -> Option<bool> {
    let status = service.0.registry.status(Instant::now());
    let mut workers = status.into_iter();
    let found = workers.find(|worker| worker.instance_id == instance_id);
    found.map(|worker| worker.connected)
}

/// The registration is over between the two steps by which a connection ends.
#[test]
fn a_worker_whose_connection_ended_while_it_registered_is_removed() {
    let test = own_test(a_worker_whose_connection_ended_while_it_registered_is_removed);
    Machine::in_own_process(1, test, |machine| {
        let (service, memory) = (service(|_| {}), GpuMemory::new(machine));
        let mut other = Memory::new().registration();
        let host = Memory::new();
        other.kv_caches = host.registration().kv_caches;
        other.instance_id = 2;
        let request = Request::RegisterKvCache(Box::new(other));
        assert_eq!(reply(&service, 1, request), Reply::None);
        let request = Request::RegisterKvCache(Box::new(memory.registration()));
        let job = job(&service, request, Instant::now());
        let end = Instant::now();
        thread::scope(|scope| {
            let prepared = service.0.transfers.prepared.lock();
            scope.spawn(|| service.client_gone(client(1), end));
            until("the first step is over", || {
                connected(&service, 2) == Some(false)
            });
            assert_eq!(job.run(), Reply::None);
            drop(prepared);
        });
        assert_eq!(connected(&service, 1), Some(false));
        service.tick(end + Duration::from_secs(60));
        assert_eq!(connected(&service, 1), None);
        assert_given_back(machine);
    });
}

/// A connection that has ended is still known while slots are held for it.
#[test]
fn a_worker_that_registers_after_the_end_of_its_connection_is_removed() {
    let test = own_test(a_worker_that_registers_after_the_end_of_its_connection_is_removed);
    Machine::in_own_process(1, test, |machine| {
        let (service, memory) = (service(|_| {}), GpuMemory::new(machine));
        let request = Request::RegisterKvCache(Box::new(memory.registration()));
        let job = job(&service, request, Instant::now());
        let end = Instant::now();
        (service.0.registry.connections).end(client(1), true, end);
        assert_eq!(job.run(), Reply::None);
        assert_eq!(connected(&service, 1), Some(false));
        service.tick(end + Duration::from_secs(60));
        assert_eq!(connected(&service, 1), None);
        assert_given_back(machine);
    });
}

#[test]
fn a_registration_takes_over_while_a_copy_of_the_one_before_is_under_way() {
    let test = own_test(a_registration_takes_over_while_a_copy_of_the_one_before_is_under_way);
    Machine::in_own_process(1, test, |machine| {
        let (service, memory) = (service(|_| {}), GpuMemory::new(machine));
        memory.register(&service);
        until("the pool is registered", || {
            machine.live(std::process::id()).registrations == 1
        });
        let written = memory.write_later(7);
        memory.engine.synchronize();
        let first = job(&service, after(store(1), &written.handle()), Instant::now());
        machine.hold(0);
        thread::scope(|scope| {
            let storing = scope.spawn(|| first.run());
            until_it_waits(machine, &storing);
            memory.register(&service);
            assert!(!storing.is_finished());
            assert_eq!(machine.live(std::process::id()).mappings, 1);
            machine.resume(0);
            let stopped = storing.join().expect("it ends");
            assert_eq!(stopped, Reply::Transferred(false));
        });
        assert_eq!(found(&service, 1, "b", 2), Reply::Int(0));
        let again = after(store(1), &written.handle());
        assert_eq!(reply(&service, 1, again), Reply::Transferred(true));
        unregister(&service);
        assert_given_back(machine);
    });
}
