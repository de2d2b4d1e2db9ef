//! Running the steps of a call on several threads.
//!
//! A call is a short list of steps; each step is a number of independent units that threads claim
//! in shrinking ranges, so that a slow or late thread does not hold the others up. A thread goes on
//! to the next step when every unit of the last one is done. It only ever waits for units another
//! thread is computing at that moment, never for a thread to arrive, so calls from several threads
//! at once cannot block each other even where they share one pool.
//!
//! So a call cannot wait for the jobs by which it asks the pool for helpers: they may stand behind another call's. A job
//! looks at the caller's [`Desk`] when it starts. It helps with the call that lies there, the one that asked for it or a
//! later one of this caller, or finds the desk closed and is over. The caller closes its desk before it returns, and then
//! waits for the helpers that are inside, who have no units left. A helper that comes late joins at the step where the call
//! is, and a call of several passes asks for helpers in each.
//!
//! What is borrowed is out of reach of late jobs: a job holds the desk alone, which is not borrowed, and follows its pointer
//! to the call only if it entered. All that a job needs to know when it is late is in the desk.
//!
//! Threads of another runtime come and go by its own [`ForkJoin`], which needs no desk: all are out of the call when it returns,
//! and the caller waits for all of them.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::ThreadPool;

use crate::placement;

/// Most steps one call has.
pub(crate) const MAX_STEPS: usize = 4;

/// Threads of another runtime, such as the team of OpenMP's that a program computes with anyway: where two pools take turns in
/// one program, each waits for threads of the other to go to sleep.
pub trait ForkJoin: std::fmt::Debug + Send + Sync {
    /// The threads that a call from this thread may have at the moment, the caller included; asked in every call that would
    /// share its work.
    fn threads(&self) -> usize;

    /// Runs `part` on threads of the runtime, the caller among them, and returns when all have: `threads` of them are wanted. Of
    /// more, the others are over at once, and fewer do what there is. No part panics.
    fn run(&self, threads: usize, part: &(dyn Fn() + Sync));
}

/// Independent units of work; `run` is given a range of them and the number of the worker.
pub(crate) struct Step<'a> {
    pub(crate) units: usize,
    pub(crate) run: &'a (dyn Fn(Range<usize>, usize) + Sync),
}

#[derive(Default)]
struct Progress {
    claimed: AtomicUsize,
    done: AtomicUsize,
}

impl Progress {
    /// A share of what is left, smaller towards the end.
    fn claim(&self, units: usize, workers: usize) -> Option<Range<usize>> {
        let mut start = self.claimed.load(Ordering::Relaxed);
        while start < units {
            let count = if workers == 1 { units } else { (units - start).div_ceil(2 * workers) };
            match self.claimed.compare_exchange_weak(
                start,
                start + count,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(start..start + count),
                Err(now) => start = now,
            }
        }
        None
    }
}

/// Waits for what other threads are about to do. Acquire: what they did before is visible then.
fn wait_until(counter: &AtomicUsize, reached: impl Fn(usize) -> bool) {
    let mut spins = 0u32;
    while !reached(counter.load(Ordering::Acquire)) {
        spins += 1;
        if spins.is_multiple_of(256) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Counts a range as done, also when it ends in a panic: the others must not wait for ever.
struct Counted<'a>(&'a AtomicUsize, usize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(self.1, Ordering::Release);
    }
}

/// What the threads of a call share.
struct Call<'a> {
    steps: &'a [Step<'a>],
    progress: [Progress; MAX_STEPS],
    workers: usize,
    /// The caller's processor, which helpers of a pool leave.
    processor: usize,
    /// The number of the next helper.
    next: AtomicUsize,
    /// What a helper panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl<'a> Call<'a> {
    fn new(steps: &'a [Step<'a>], workers: usize) -> Self {
        assert!(steps.len() <= MAX_STEPS, "a call has at most {MAX_STEPS} steps");
        let (progress, panic) = Default::default();
        Self { steps, progress, workers, processor: usize::MAX, next: AtomicUsize::new(1), panic }
    }

    fn work(&self, worker: usize) {
        for (step, progress) in self.steps.iter().zip(&self.progress) {
            while let Some(range) = progress.claim(step.units, self.workers) {
                let _counted = Counted(&progress.done, range.len());
                (step.run)(range, worker);
            }
            wait_until(&progress.done, |done| done >= step.units);
        }
    }

    /// Takes part as the next worker, if one is wanted.
    fn help(&self) {
        let worker = self.next.fetch_add(1, Ordering::Relaxed);
        if worker >= self.workers {
            return;
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.work(worker))) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }

    /// Goes on with what a helper panicked with.
    fn check(&self) {
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// Of [`Desk::state`]: helpers may enter. The rest counts those inside.
const OPEN: usize = 1 << (usize::BITS - 1);

/// Where jobs look for the call of one caller.
#[derive(Default)]
struct Desk {
    state: AtomicUsize,
    /// Jobs that have not looked yet.
    asked: AtomicUsize,
    /// Of a caller that is in [`Open`]; written only while the desk is closed and nobody inside.
    call: UnsafeCell<Option<*const Call<'static>>>,
}

// SAFETY: `call` is written by the one thread that has taken the desk from its team, while `state` lets nobody in, and read
// by threads that `state` let in after that; the call itself is shared as `Call` allows, see below.
unsafe impl Send for Desk {}
// SAFETY: as above.
unsafe impl Sync for Desk {}

/// Steps are called by all threads of a call, and the rest of it is atomic or locked.
const _: fn() = || {
    fn shared<T: Sync>() {}
    shared::<Call<'static>>();
};

impl Desk {
    /// What a job does.
    fn help(&self) {
        // Before it looks: a caller that opens the desk in between counts on it, or asks for one more.
        self.asked.fetch_sub(1, Ordering::SeqCst);
        let enter = |state: usize| (state & OPEN != 0).then(|| state + 1);
        if self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_err() {
            return;
        }
        // SAFETY: the desk was open, so a call lies there, and its caller waits until `state` says that this thread has left.
        // Opening and entering are ordered by `state`, so this is the pointer of that call and not of an earlier one.
        let call = unsafe { (*self.call.get()).map(|call| &*call) };
        if let Some(call) = call {
            let _ = placement::leave(call.processor);
            call.help();
        }
        // Release: what this thread did happened before the caller goes on.
        self.state.fetch_sub(1, Ordering::Release);
    }
}

/// A desk while it is open. It is closed when this is dropped, also where the caller's own part panics.
struct Open<'a>(&'a Desk);

impl<'a> Open<'a> {
    /// # Safety
    /// No other thread opens this desk, and the call lives until what is returned is dropped.
    unsafe fn new(desk: &'a Desk, call: &Call<'_>) -> Self {
        // SAFETY: the desk is closed and nobody inside, since the last `Open` was dropped. The caller vouches for the
        // call's life, so its lifetime need not be known.
        unsafe { *desk.call.get() = Some(std::ptr::from_ref(call).cast()) };
        desk.state.store(OPEN, Ordering::SeqCst);
        Self(desk)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::SeqCst);
        wait_until(&self.0.state, |inside| inside == 0);
    }
}

/// Where helpers come from.
enum Helpers {
    /// A pool, with a desk for each of the callers that there were at the same time.
    Pool(Pool),
    /// Another runtime.
    ForkJoin(Arc<dyn ForkJoin>),
}

/// The helpers of a device's calls.
pub(crate) struct Team {
    helpers: Helpers,
    /// Calls in progress, those without helpers among them.
    calls: AtomicUsize,
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.helpers {
            Helpers::Pool(pool) => pool.pool.fmt(f),
            Helpers::ForkJoin(threads) => threads.fmt(f),
        }
    }
}

impl Team {
    pub(crate) fn of_pool(pool: Arc<ThreadPool>) -> Self {
        Self::new(Helpers::Pool(Pool { pool, desks: Mutex::default() }))
    }

    pub(crate) fn of_fork_join(threads: Arc<dyn ForkJoin>) -> Self {
        Self::new(Helpers::ForkJoin(threads))
    }

    fn new(helpers: Helpers) -> Self {
        Self { helpers, calls: AtomicUsize::new(0) }
    }

    /// Makes ready for so many callers at the same time.
    pub(crate) fn reserve(&self, callers: usize) {
        if let Helpers::Pool(pool) = &self.helpers {
            let mut desks = pool.desks();
            let there_are = desks.len().max(callers);
            desks.resize_with(there_are, Arc::default);
        }
    }

    fn run(&self, workers: usize, steps: &[Step<'_>]) {
        match &self.helpers {
            Helpers::Pool(pool) => {
                pool.run(&Call { processor: placement::current(), ..Call::new(steps, workers) })
            }
            Helpers::ForkJoin(threads) => {
                let workers = workers.min(threads.threads()).max(1);
                // The caller is one of those that take part.
                let call = Call { next: AtomicUsize::new(0), ..Call::new(steps, workers) };
                if workers > 1 {
                    threads.run(workers, &|| call.help());
                    call.check();
                }
                // Nothing is left, where anybody took part.
                call.work(0);
            }
        }
    }
}

/// A pool and its desks.
struct Pool {
    pool: Arc<ThreadPool>,
    desks: Mutex<Vec<Arc<Desk>>>,
}

impl Pool {
    fn desks(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Desk>>> {
        self.desks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, call: &Call<'_>) {
        let desk = self.desks().pop().unwrap_or_default();
        // SAFETY: the desk is this thread's until it is given back, and the call outlives what is returned.
        let open = unsafe { Open::new(&desk, call) };
        // Jobs of earlier calls that are still to look come here, too.
        let asked = desk.asked.load(Ordering::SeqCst);
        for _ in asked + 1..call.workers {
            let desk = desk.clone();
            desk.asked.fetch_add(1, Ordering::SeqCst);
            self.pool.spawn(move || desk.help());
        }
        call.work(0);
        drop(open);
        self.desks().push(desk);
        call.check();
    }
}

/// Counts a call in progress, also where it ends in a panic.
struct InProgress<'a>(&'a AtomicUsize);

impl<'a> InProgress<'a> {
    fn new(calls: &'a AtomicUsize) -> Self {
        calls.fetch_add(1, Ordering::Relaxed);
        Self(calls)
    }
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `steps` one after the other, each on up to `workers` threads, the caller among them.
pub(crate) fn run(team: Option<&Team>, workers: usize, steps: &[Step<'_>]) {
    let workers = workers.min(steps.iter().map(|s| s.units).max().unwrap_or(0)).max(1);
    let _in_progress = team.map(|team| InProgress::new(&team.calls));
    match team {
        Some(team) if workers > 1 => team.run(workers, steps),
        _ => Call::new(steps, 1).work(0),
    }
}

/// Runs steps as [`run`] that take less time than the system leaves a thread its processor: with a helper fewer for each
/// other call in progress, whose caller has a processor too. With more threads than processors a helper that has begun can
/// lose its own for several such times, and the caller waits: on two processors under other load, of eight callers with one
/// token each (288/768) the slowest call took 1.3 to 1.7 times as long with helpers as without, and all calls 1.0 to 1.4 times.
pub(crate) fn run_short(team: Option<&Team>, workers: usize, steps: &[Step<'_>]) {
    let others = team.map_or(0, |team| team.calls.load(Ordering::Relaxed));
    run(team, workers.saturating_sub(others), steps);
}

#[cfg(test)]
#[path = "team_tests.rs"]
mod tests;
