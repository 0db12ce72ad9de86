//! Parallel tasks on the threads of the pool and on the calling thread.
//!
//! Threads of a pool sleep between kernels and take some tens of microseconds to wake; a thread
//! outside the pool would wake one of them and then sleep itself. Here the calling thread starts at
//! once, and when no task is left, it does not wait for threads that have not started.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Thread;

use crate::lock::lock;

/// Spins before the calling thread sleeps while the last tasks finish, which usually takes little
/// time.
const SPINS: usize = 1 << 12;

/// Batches per thread, if there are enough tasks.
const BATCHES: usize = 16;

/// Runs `run` for every task in `0..count`, on the calling thread and as many threads of the pool
/// as receive at least `least` tasks each. A task must not wait for another task.
///
/// # Panics
/// Panics if a task panics, once all started tasks have ended, and if there are 2³² tasks or more.
///
/// # Example
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use halocline_core::tasks;
///
/// let sum = AtomicUsize::new(0);
/// tasks::for_each(1000, 10, |task| {
///     sum.fetch_add(task, Ordering::Relaxed);
/// });
/// assert_eq!(sum.into_inner(), 999 * 1000 / 2);
/// ```
pub fn for_each(count: usize, least: usize, run: impl Fn(usize) + Sync) {
    for_each_init(count, least, || (), |(), task| run(task));
}

/// Like [`for_each`], with a value that each thread makes before its first task.
///
/// # Panics
/// Panics as [`for_each`] does.
///
/// # Example
/// ```
/// use halocline_core::tasks;
///
/// tasks::for_each_init(100, 10, Vec::new, |scratch, task| {
///     scratch.clear();
///     scratch.extend(0..task);
///     assert_eq!(scratch.len(), task);
/// });
/// ```
pub fn for_each_init<T>(
    count: usize,
    least: usize,
    init: impl Fn() -> T + Sync,
    run: impl Fn(&mut T, usize) + Sync,
) {
    let least = least.max(1);
    let threads = rayon::current_num_threads().min(count / least);
    if threads <= 1 {
        let mut value = init();
        (0..count).for_each(|task| run(&mut value, task));
        return;
    }
    // Batches are small enough that threads finish together even if one starts late.
    let batch = least.min(count / (BATCHES * threads)).max(1);
    let body = |shares: &Shares, thread: usize| {
        let mut value = None;
        while let Some(first) = shares.next(thread) {
            let value = value.get_or_insert_with(&init);
            let tasks = first * batch..count.min((first + 1) * batch);
            tasks.for_each(|task| run(value, task));
        }
    };
    let body: *const (dyn Fn(&Shares, usize) + Sync + '_) = &raw const body;
    // SAFETY: only the lifetime changes; see `Crew::help` for why the body is alive when it is
    // called.
    let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
    let crew = Arc::new(Crew {
        shares: Shares::new(count.div_ceil(batch), threads),
        gate: AtomicUsize::new(0),
        body,
        failure: Mutex::new(None),
        owner: std::thread::current(),
    });
    for thread in 1..threads {
        let crew = crew.clone();
        rayon::spawn(move || crew.help(thread));
    }
    crew.lead();
}

/// Runs one task, as [`for_each`] does, for each part of a slice. All parts have `size` elements
/// (at least one) except the last, which may have fewer.
///
/// # Panics
/// Panics as [`for_each`] does.
///
/// # Example
/// ```
/// use halocline_core::tasks;
///
/// let mut squares = [0; 10];
/// tasks::for_each_part(&mut squares, 4, 1, |part, squares| {
///     for (place, square) in (4 * part..).zip(squares) {
///         *square = place * place;
///     }
/// });
/// assert_eq!(squares, [0, 1, 4, 9, 16, 25, 36, 49, 64, 81]);
/// ```
pub fn for_each_part<E: Send>(
    elements: &mut [E],
    size: usize,
    least: usize,
    run: impl Fn(usize, &mut [E]) + Sync,
) {
    struct First<E>(*mut E);
    // SAFETY: every part is used by exactly one task.
    unsafe impl<E: Send> Sync for First<E> {}
    impl<E> First<E> {
        fn at(&self, place: usize) -> *mut E {
            self.0.wrapping_add(place)
        }
    }
    let (len, size) = (elements.len(), size.max(1));
    let first = First(elements.as_mut_ptr());
    for_each(len.div_ceil(size), least, |part| {
        let start = part * size;
        let len = size.min(len - start);
        // SAFETY: a part of the slice that no other task uses.
        run(part, unsafe {
            std::slice::from_raw_parts_mut(first.at(start), len)
        });
    });
}

/// Returns the results of tasks, in task order; the tasks run as in [`for_each`].
///
/// # Panics
/// Panics as [`for_each`] does.
///
/// # Example
/// ```
/// use halocline_core::tasks;
///
/// assert_eq!(tasks::map(5, 1, |task| task * task), [0, 1, 4, 9, 16]);
/// ```
pub fn map<T: Send>(count: usize, least: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let mut results = Vec::with_capacity(count);
    let places = &mut results.spare_capacity_mut()[..count];
    for_each_part(places, 1, least, |task, place| {
        place[0].write(run(task));
    });
    // SAFETY: every task has run, and written its place.
    unsafe { results.set_len(count) };
    results
}

/// Runs `work`, for which the other ranks wait, with all threads of the process rather than a local
/// rank's share.
///
/// # Panics
/// Panics where `work` does.
///
/// # Example
/// ```
/// use halocline_core::tasks::with_all_threads;
///
/// assert_eq!(with_all_threads(|| 6 * 7), 42);
/// ```
pub fn with_all_threads<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    // A thread outside any pool uses the pool of the process.
    let done = std::thread::scope(|scope| scope.spawn(work).join());
    done.unwrap_or_else(|payload| resume_unwind(payload))
}

/// The tasks left for each thread: a range, with both ends packed in one word.
struct Shares(Vec<Share>);

/// One share, on its own cache lines because other threads write theirs concurrently.
#[repr(align(128))]
struct Share(AtomicU64);

impl Shares {
    fn new(count: usize, threads: usize) -> Self {
        assert!(u32::try_from(count).is_ok(), "{count} tasks");
        let end = |thread: usize| count * thread / threads;
        let range = |thread: usize| word(end(thread) as u64, end(thread + 1) as u64);
        Self(
            (0..threads)
                .map(|thread| Share(AtomicU64::new(range(thread))))
                .collect(),
        )
    }

    /// Returns the next task of a thread: the first of its share or, if that is empty, the first of
    /// the second half of another thread's share, which then becomes its own share.
    fn next(&self, thread: usize) -> Option<usize> {
        let take = |share: &Share, taken: fn(u64, u64) -> u64| {
            share
                .0
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |found| {
                    let (start, end) = ends(found);
                    (start < end).then(|| taken(start, end))
                })
        };
        if let Ok(found) = take(&self.0[thread], |start, end| word(start + 1, end)) {
            return Some(ends(found).0 as usize);
        }
        let count = self.0.len();
        for other in (1..count).map(|step| (thread + step) % count) {
            let half = |start: u64, end: u64| word(start, start.midpoint(end));
            if let Ok(found) = take(&self.0[other], half) {
                let (start, end) = ends(found);
                let first = start.midpoint(end);
                // No thread changes the share of another thread while it is empty.
                self.0[thread]
                    .0
                    .store(word(first + 1, end), Ordering::Relaxed);
                return Some(first as usize);
            }
        }
        None
    }
}

fn word(start: u64, end: u64) -> u64 {
    start << 32 | end
}

fn ends(word: u64) -> (u64, u64) {
    (word >> 32, word & u64::from(u32::MAX))
}

type Body<'a> = dyn Fn(&Shares, usize) + Sync + 'a;

/// The calling thread and its helpers.
struct Crew {
    shares: Shares,
    /// The number of active helpers, with the bit [`CLOSED`] set once no more may start.
    gate: AtomicUsize,
    body: *const Body<'static>,
    failure: Mutex<Option<Box<dyn Any + Send>>>,
    owner: Thread,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

// SAFETY: the body is `Sync`, and is called only as described at `help`.
unsafe impl Send for Crew {}
// SAFETY: as above.
unsafe impl Sync for Crew {}

impl Crew {
    /// Runs tasks on the calling thread until none is left, then waits for the helpers.
    fn lead(&self) {
        self.work(0);
        self.gate.fetch_or(CLOSED, Ordering::AcqRel);
        let mut spins = 0;
        while self.gate.load(Ordering::Acquire) != CLOSED {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::park();
            }
        }
        let failure = lock(&self.failure).take();
        if let Some(failure) = failure {
            resume_unwind(failure);
        }
    }

    /// Runs tasks, unless the gate is closed. Meanwhile the calling thread stays in
    /// [`lead`](Self::lead), which keeps the body alive.
    fn help(&self, thread: usize) {
        let enter = |gate: usize| (gate & CLOSED == 0).then_some(gate + 1);
        let entered = self
            .gate
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, enter);
        if entered.is_ok() {
            self.work(thread);
            if self.gate.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
                self.owner.unpark();
            }
        }
    }

    fn work(&self, thread: usize) {
        // SAFETY: called by the calling thread, which owns the body, or as described at `help`.
        let body = unsafe { &*self.body };
        let done = catch_unwind(AssertUnwindSafe(|| body(&self.shares, thread)));
        if let Err(failure) = done {
            let mut first = lock(&self.failure);
            if first.is_none() {
                *first = Some(failure);
            } else {
                // Dropping it might panic while helpers are running.
                std::mem::forget(failure);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn on(threads: usize, run: impl FnOnce() + Send) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads").install(run);
    }

    fn runs_all() {
        for count in [0, 1, 2, 3, 7, 1001] {
            for least in [0, 1, 7, 100, 2000] {
                let runs: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                for_each(count, least, |task| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
                let tasks = map(count, least, |task| task);
                assert!(tasks.into_iter().eq(0..count));
                let made = AtomicUsize::new(0);
                let init = || made.fetch_add(1, Ordering::Relaxed);
                for_each_init(count, least, init, |_, _| ());
                assert!(made.into_inner() <= rayon::current_num_threads());
            }
        }
    }

    #[test]
    fn every_task_runs_once() {
        for _ in 0..200 {
            runs_all();
        }
        for threads in [1, 2, 3, 7] {
            on(threads, || (0..20).for_each(|_| runs_all()));
        }
    }

    #[test]
    fn parts_are_those_of_the_slice() {
        for_each_part(&mut [0; 0], 0, 1, |_, _| unreachable!("no part"));
        let mut elements = vec![0; 23];
        for_each_part(&mut elements, 5, 1, |part, elements| {
            elements
                .iter_mut()
                .enumerate()
                .for_each(|(place, element)| *element = 5 * part + place);
        });
        assert!(elements.into_iter().eq(0..23));
    }

    #[test]
    fn a_task_may_have_tasks() {
        let sum = AtomicUsize::new(0);
        for_each(20, 1, |outer| {
            for_each(30, 1, |inner| {
                sum.fetch_add(outer * inner, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 190 * 435);
    }

    /// The other thread of the pool is busy. Helpers that start late run no task, because the
    /// closure is gone by then.
    #[test]
    fn nobody_waits_for_a_thread_that_comes_late() {
        let [begun, ended] = [(); 2].map(|()| Arc::new(Barrier::new(2)));
        let runs = AtomicUsize::new(0);
        on(2, || {
            let barriers = [begun.clone(), ended.clone()];
            rayon::spawn(move || {
                for barrier in barriers {
                    barrier.wait();
                }
            });
            begun.wait();
            for calls in 1..=20 {
                for_each(100, 1, |_| {
                    runs.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(runs.load(Ordering::Relaxed), 100 * calls);
            }
            ended.wait();
            while rayon::yield_now() == Some(rayon::Yield::Executed) {}
            assert_eq!(runs.load(Ordering::Relaxed), 100 * 20);
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_when_all_have_ended() {
        for threads in [1, 2, 5] {
            on(threads, || {
                let running = AtomicUsize::new(0);
                let run = || {
                    for_each(100, 1, |task| {
                        running.fetch_add(1, Ordering::Relaxed);
                        std::thread::yield_now();
                        running.fetch_sub(1, Ordering::Relaxed);
                        assert_ne!(task, 37, "a task that fails");
                    });
                };
                let failure = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
                let text = failure.downcast_ref::<String>().expect("a text");
                assert!(text.contains("a task that fails"));
                assert_eq!(running.into_inner(), 0);
            });
        }
    }
}
