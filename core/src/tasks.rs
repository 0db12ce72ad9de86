//! Tasks on the threads of the pool and on the calling one.
//!
//! Threads of a pool sleep between kernels, and take some tens of microseconds to wake; a thread that is not of the pool would
//! wake one of them and sleep itself. So the calling thread begins at once. When no task is left, it does not wait for threads
//! that have not begun.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Thread;

/// Turns of waiting before the calling thread sleeps: the last tasks of others are about as long as its own.
const SPINS: usize = 1 << 12;

/// Batches of tasks for each thread, if there are so many.
const BATCHES: usize = 16;

/// Runs `run` for every task in `0..count`, on as many threads as there are, but no more than give each `least` tasks.
///
/// # Panics
/// Panics if a task does, when all that have begun have ended.
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

/// [`for_each`] with a value that each thread makes before its first task.
///
/// # Panics
/// As there.
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
    // So many are taken at a time that threads end together, though one begins late.
    let batch = least.min(count / (BATCHES * threads)).max(1);
    let body = |shares: &Shares, own: usize| {
        let mut value = None;
        while let Some(first) = shares.next(own) {
            let value = value.get_or_insert_with(&init);
            let tasks = first * batch..count.min((first + 1) * batch);
            tasks.for_each(|task| run(value, task));
        }
    };
    let body: *const (dyn Fn(&Shares, usize) + Sync + '_) = &raw const body;
    // SAFETY: only the lifetime changes; `Crew::help` says why the body is there when it is called.
    let body = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(body) };
    let crew = Arc::new(Crew {
        shares: Shares::new(count.div_ceil(batch), threads),
        gate: AtomicUsize::new(0),
        body,
        failure: Mutex::new(None),
        owner: std::thread::current(),
    });
    for own in 1..threads {
        let crew = crew.clone();
        rayon::spawn(move || crew.help(own));
    }
    crew.lead();
}

/// [`for_each`] of the parts of a slice, of `size` elements but for the last one.
///
/// # Panics
/// As there.
pub fn for_each_part<E: Send>(
    elements: &mut [E],
    size: usize,
    least: usize,
    run: impl Fn(usize, &mut [E]) + Sync,
) {
    struct First<E>(*mut E);
    // SAFETY: every part is one task's.
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
        // SAFETY: a part of the slice, which no other task has.
        run(part, unsafe {
            std::slice::from_raw_parts_mut(first.at(start), len)
        });
    });
}

/// What [`for_each`] gives for every task.
///
/// # Panics
/// As there.
pub fn map<T: Send>(count: usize, least: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let mut found: Vec<Option<T>> = (0..count).map(|_| None).collect();
    for_each_part(&mut found, 1, least, |task, found| {
        found[0] = Some(run(task))
    });
    let found = found.into_iter();
    found
        .map(|found| found.expect("every task has run"))
        .collect()
}

/// The tasks that each thread has left: those of a range, whose ends are in one word.
struct Shares(Vec<AtomicU64>);

impl Shares {
    fn new(count: usize, threads: usize) -> Self {
        assert!(u32::try_from(count).is_ok(), "{count} tasks");
        let end = |thread: usize| count * thread / threads;
        let range = |thread: usize| word(end(thread) as u64, end(thread + 1) as u64);
        Self(
            (0..threads)
                .map(|thread| AtomicU64::new(range(thread)))
                .collect(),
        )
    }

    /// The next task of a thread: its first one, or, where it has none, that of the second half of what another has.
    fn next(&self, own: usize) -> Option<usize> {
        let take = |share: &AtomicU64, taken: fn(u64, u64) -> u64| {
            share.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |found| {
                let (start, end) = ends(found);
                (start < end).then(|| taken(start, end))
            })
        };
        if let Ok(found) = take(&self.0[own], |start, end| word(start + 1, end)) {
            return Some(ends(found).0 as usize);
        }
        let count = self.0.len();
        for other in (1..count).map(|step| (own + step) % count) {
            let half = |start: u64, end: u64| word(start, start.midpoint(end));
            if let Ok(found) = take(&self.0[other], half) {
                let (start, end) = ends(found);
                let first = start.midpoint(end);
                // Nobody takes from an empty share.
                self.0[own].store(word(first + 1, end), Ordering::Relaxed);
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

/// The calling thread, and those that help it.
struct Crew {
    shares: Shares,
    /// How many help, and [`CLOSED`] when nobody may begin any more.
    gate: AtomicUsize,
    body: *const Body<'static>,
    failure: Mutex<Option<Box<dyn Any + Send>>>,
    owner: Thread,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

// SAFETY: the body, which is `Sync`, is called only as `help` says.
unsafe impl Send for Crew {}
// SAFETY: as above.
unsafe impl Sync for Crew {}

impl Crew {
    /// Runs tasks until none is left, as the calling thread, and waits for those who help.
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
        let failure = self
            .failure
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .take();
        if let Some(failure) = failure {
            resume_unwind(failure);
        }
    }

    /// Helps, unless the gate is closed. While somebody helps, the calling thread stays in [`lead`](Self::lead), and the body is
    /// there.
    fn help(&self, own: usize) {
        let enter = |gate: usize| (gate & CLOSED == 0).then_some(gate + 1);
        let entered = self
            .gate
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, enter);
        if entered.is_ok() {
            self.work(own);
            if self.gate.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
                self.owner.unpark();
            }
        }
    }

    fn work(&self, own: usize) {
        // SAFETY: called by the calling thread, whose body it is, or as `help` says.
        let body = unsafe { &*self.body };
        let done = catch_unwind(AssertUnwindSafe(|| body(&self.shares, own)));
        if let Err(failure) = done {
            let mut first = self
                .failure
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            first.get_or_insert(failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn on(threads: usize, run: impl FnOnce() + Send) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads").install(run);
    }

    fn runs_all() {
        for count in [0, 1, 2, 3, 7, 1000] {
            for least in [1, 5, 2000] {
                let runs: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                for_each(count, least, |task| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
                let tasks = map(count, least, |task| task);
                assert!(tasks.into_iter().eq(0..count));
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
