//! What a call waits for, and what it does not.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use super::*;

fn team(helpers: usize) -> Team {
    Team::of_pool(Arc::new(rayon::ThreadPoolBuilder::new().num_threads(helpers).build().unwrap()))
}

fn pool(team: &Team) -> &Pool {
    match &team.helpers {
        Helpers::Pool(pool) => pool,
        Helpers::ForkJoin(threads) => panic!("no pool but {threads:?}"),
    }
}

/// Waits for a message that must come; what is late by a minute hangs.
fn expect<T>(messages: &Mutex<Receiver<T>>, what: &str) -> T {
    let received = messages.lock().unwrap().recv_timeout(Duration::from_secs(60));
    received.unwrap_or_else(|e: RecvTimeoutError| panic!("{what}: {e}"))
}

#[test]
fn every_unit_runs_once_and_steps_follow_each_other() {
    let team = team(3);
    for (team, workers) in [(None, 1), (Some(&team), 4), (Some(&team), 2)] {
        let counts: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
        let first = |range: Range<usize>, _: usize| {
            range.for_each(|i| _ = counts[i].fetch_add(1, Ordering::Relaxed));
        };
        let second = |range: Range<usize>, worker: usize| {
            assert!(worker < workers);
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) > 0));
            range.for_each(|i| _ = counts[i].fetch_add(10, Ordering::Relaxed));
        };
        let none = |_: Range<usize>, _: usize| panic!("no units");
        let steps = [
            Step { units: 97, run: &first },
            Step { units: 0, run: &none },
            Step { units: 50, run: &second },
        ];
        run(team, workers, &steps);
        let expected = (0..97).map(|i| if i < 50 { 11 } else { 1 });
        assert!(counts.iter().map(|c| c.load(Ordering::Relaxed)).eq(expected));
    }
}

/// Two units, each of which waits until the other is computed too: by the caller and by a helper.
fn call_that_needs_a_helper(team: &Team) {
    let ((to_first, first), (to_second, second)) = (channel(), channel());
    let (first, second) = (Mutex::new(first), Mutex::new(second));
    let meet = |units: Range<usize>, _: usize| match units.start {
        0 => {
            to_second.send(()).unwrap();
            expect(&first, "the second unit");
        }
        _ => {
            to_first.send(()).unwrap();
            expect(&second, "the first unit");
        }
    };
    run(Some(team), 2, &[Step { units: 2, run: &meet }]);
}

/// The pool's only thread is inside one call, in a unit that ends when the test says so. Other calls are over before
/// that: they do not wait for a helper that cannot come. The jobs that they left in the queue harm nobody afterwards.
#[test]
fn calls_from_many_threads_share_one_pool_without_blocking() {
    let team = team(1);
    let ((inside, is_inside), (open, gate)) = (channel(), channel());
    let (is_inside, gate) = (Mutex::new(is_inside), Mutex::new(gate));
    let (caller_may_end, caller_ends) = channel();
    let caller_ends = Mutex::new(caller_ends);
    let held = |_: Range<usize>, worker: usize| match worker {
        0 => expect(&caller_ends, "a helper"),
        _ => {
            inside.send(()).unwrap();
            expect(&gate, "the end of the other calls");
        }
    };
    let total = AtomicUsize::new(0);
    let add = |r: Range<usize>, worker: usize| {
        assert_eq!(worker, 0, "the helper is in another call");
        total.fetch_add(r.len(), Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(Some(&team), 2, &[Step { units: 2, run: &held }]));
        expect(&is_inside, "the helper");
        caller_may_end.send(()).unwrap();
        let others: Vec<_> = (0..4)
            .map(|_| {
                let (team, step) = (&team, || Step { units: 33, run: &add });
                let calls = move || (0..200).for_each(|_| run(Some(team), 2, &[step(), step()]));
                let (done, is_done) = channel();
                scope.spawn(move || {
                    calls();
                    // The test may have given up.
                    let _ = done.send(());
                });
                is_done
            })
            .collect();
        let ends: Vec<_> =
            others.iter().map(|done| done.recv_timeout(Duration::from_secs(60))).collect();
        // Whatever they came to: threads are waited for.
        open.send(()).unwrap();
        assert!(ends.iter().all(Result::is_ok), "calls waited for a helper: {ends:?}");
    });
    assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 66);
    for _ in 0..100 {
        call_that_needs_a_helper(&team);
    }
}

/// Callers ask for no more jobs while earlier ones are still to look.
#[test]
fn jobs_do_not_pile_up() {
    let team = team(1);
    let (open, gate) = channel();
    let gate = Mutex::new(gate);
    pool(&team).pool.spawn(move || expect(&gate, "the calls"));
    let nothing = |_: Range<usize>, _: usize| {};
    for _ in 0..100 {
        run(Some(&team), 2, &[Step { units: 8, run: &nothing }]);
    }
    let asked: Vec<_> =
        pool(&team).desks().iter().map(|d| d.asked.load(Ordering::SeqCst)).collect();
    open.send(()).unwrap();
    assert_eq!(asked, [1]);
    call_that_needs_a_helper(&team);
}

#[test]
fn a_panic_is_passed_on_and_does_not_hang() {
    let team = team(1);
    let fine = |_: Range<usize>, _: usize| {};
    // In whichever thread takes the unit, in the caller, and in the helper.
    for panics in [None, Some(0), Some(1)] {
        let (met, meeting) = channel();
        let meeting = Mutex::new(meeting);
        let fails = |r: Range<usize>, worker: usize| match panics {
            None => assert!(!r.contains(&7), "unit 7"),
            Some(who) if who == worker => {
                met.send(()).unwrap();
                panic!("worker {worker}");
            }
            Some(_) => expect(&meeting, "the other worker"),
        };
        let units = if panics.is_none() { 20 } else { 2 };
        let steps = [Step { units, run: &fails }, Step { units: 20, run: &fine }];
        let call = AssertUnwindSafe(|| run(Some(&team), 2, &steps));
        assert!(catch_unwind(call).is_err(), "{panics:?}");
    }
    call_that_needs_a_helper(&team);
}

/// Ends within a minute, or the test hangs in a thread of its own while this says so.
fn ends(what: &str, f: impl FnOnce() + Send + 'static) {
    let (ended, end) = channel();
    let thread = std::thread::spawn(move || {
        f();
        let _ = ended.send(());
    });
    match end.recv_timeout(Duration::from_secs(60)) {
        Err(RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        // A panic is the test's.
        _ => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
    }
}

/// A helper that starts when the first step is over takes part in the second.
#[test]
fn a_late_helper_joins_at_any_step() {
    let team = team(1);
    let (open, gate) = channel();
    let gate = Mutex::new(gate);
    pool(&team).pool.spawn(move || expect(&gate, "the first step"));
    let first = |_: Range<usize>, worker: usize| {
        assert_eq!(worker, 0, "the helper is held");
    };
    let ((to_second, second), (to_third, third)) = (channel(), channel());
    let (second, third) = (Mutex::new(second), Mutex::new(third));
    let meet = |_: Range<usize>, worker: usize| match worker {
        0 => {
            open.send(()).unwrap();
            expect(&second, "the helper");
            to_third.send(()).unwrap();
        }
        _ => {
            to_second.send(()).unwrap();
            expect(&third, "the caller");
        }
    };
    run(Some(&team), 2, &[Step { units: 9, run: &first }, Step { units: 2, run: &meet }]);
}

/// Calls from the pool's own threads: from a job, from both halves of a join, from a scope, and more of them at the same
/// time than there are threads.
#[test]
fn calls_within_jobs_of_the_same_pool_end() {
    ends("a call within the pool", || {
        let team = team(2);
        let pool = &pool(&team).pool;
        let total = AtomicUsize::new(0);
        let add = |r: Range<usize>, _: usize| _ = total.fetch_add(r.len(), Ordering::Relaxed);
        let call = || {
            let step = || Step { units: 33, run: &add };
            run(Some(&team), 3, &[step(), step()]);
        };
        for _ in 0..200 {
            pool.install(call);
            pool.install(|| rayon::join(call, || rayon::join(call, call)));
            pool.scope(|scope| (0..4).for_each(|_| scope.spawn(|_| call())));
            pool.in_place_scope(|scope| {
                scope.spawn(|_| call());
                call();
            });
        }
        assert_eq!(total.load(Ordering::Relaxed), 200 * 10 * 66);
    });
}

/// A job of the pool waits in a call for a helper, which is the pool's other thread.
#[test]
fn a_call_within_the_pool_is_helped_by_its_other_threads() {
    ends("a call within the pool", || {
        let team = team(2);
        let pool = &pool(&team).pool;
        for _ in 0..100 {
            pool.install(|| call_that_needs_a_helper(&team));
        }
    });
}

/// A panic in a helper that the pool's owner also uses: the pool goes on, for calls and for other jobs.
#[test]
fn a_panic_leaves_a_shared_pool_usable() {
    let team = team(2);
    let (met, meeting) = channel();
    let meeting = Mutex::new(meeting);
    let fails = |_: Range<usize>, worker: usize| match worker {
        0 => expect(&meeting, "a helper"),
        _ => {
            met.send(()).unwrap();
            panic!("a helper's");
        }
    };
    let call = AssertUnwindSafe(|| run(Some(&team), 2, &[Step { units: 2, run: &fails }]));
    let panic = catch_unwind(call).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"a helper's"));
    assert_eq!(pool(&team).pool.install(|| rayon::join(|| 1, || 2)), (1, 2));
    call_that_needs_a_helper(&team);
}

/// A short call within the time of another one does without the helper, and asks for none.
#[test]
fn short_calls_ask_for_no_more_threads_than_other_calls_leave() {
    let team = team(1);
    let nothing = |_: Range<usize>, worker: usize| assert_eq!(worker, 0);
    let within = |_: Range<usize>, _: usize| {
        run_short(Some(&team), 2, &[Step { units: 9, run: &nothing }]);
    };
    run(Some(&team), 1, &[Step { units: 1, run: &within }]);
    assert!(pool(&team).desks().is_empty(), "a call that asks for helpers has a desk");
    let fails = |_: Range<usize>, _: usize| panic!("a unit");
    let call = AssertUnwindSafe(|| run_short(Some(&team), 2, &[Step { units: 1, run: &fails }]));
    assert!(catch_unwind(call).is_err());
    assert_eq!(team.calls.load(Ordering::Relaxed), 0);
    run_short(Some(&team), 2, &[Step { units: 9, run: &|_, _| () }]);
    assert_eq!(pool(&team).desks().len(), 1);
}

/// A runtime that has `there_are` threads, and starts the parts of a call on so many, one after the other or at once.
#[derive(Debug)]
struct Runtime {
    there_are: usize,
    starts: usize,
    at_once: bool,
}

impl ForkJoin for Runtime {
    fn threads(&self) -> usize {
        self.there_are
    }

    fn run(&self, threads: usize, part: &(dyn Fn() + Sync)) {
        assert!(threads <= self.there_are, "{threads} threads of {}", self.there_are);
        std::thread::scope(|scope| {
            for _ in 0..self.starts {
                let started = scope.spawn(part);
                if !self.at_once {
                    started.join().unwrap();
                }
            }
        });
    }
}

#[test]
fn another_runtime_computes_every_unit_once_however_many_threads_come() {
    for (there_are, starts, at_once) in
        [(4, 4, true), (4, 2, true), (3, 9, true), (2, 2, false), (4, 0, true), (1, 0, true)]
    {
        let team = Team::of_fork_join(Arc::new(Runtime { there_are, starts, at_once }));
        let counts: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
        let busy: Vec<Mutex<()>> = (0..there_are).map(|_| Mutex::new(())).collect();
        let add = |range: Range<usize>, worker: usize| {
            let _alone = busy[worker].try_lock().expect("a number belongs to one thread at a time");
            range.for_each(|i| _ = counts[i].fetch_add(1, Ordering::Relaxed));
        };
        let steps = [Step { units: 97, run: &add }, Step { units: 50, run: &add }];
        run(Some(&team), 8, &steps);
        let expected = (0..97).map(|i| if i < 50 { 2 } else { 1 });
        assert!(counts.iter().map(|c| c.load(Ordering::Relaxed)).eq(expected), "{team:?}");
    }
}

#[test]
fn threads_of_another_runtime_compute_at_the_same_time() {
    let team = Team::of_fork_join(Arc::new(Runtime { there_are: 2, starts: 2, at_once: true }));
    ends("two units that wait for each other", move || call_that_needs_a_helper(&team));
}

#[test]
fn a_panic_on_another_runtime_reaches_the_caller() {
    let team = Team::of_fork_join(Arc::new(Runtime { there_are: 3, starts: 3, at_once: true }));
    let fails = |units: Range<usize>, _: usize| assert!(!units.contains(&5), "a unit");
    let call = AssertUnwindSafe(|| run(Some(&team), 3, &[Step { units: 9, run: &fails }]));
    let panic = catch_unwind(call).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"a unit"));
    run(Some(&team), 3, &[Step { units: 9, run: &|_, _| () }]);
}
