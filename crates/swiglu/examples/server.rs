//! A server's batching: one thread gathers what waits, computes it in one call, and answers each request. Requests of one
//! token have the same bits in every batch.
//!
//! `cargo run --release -p swiglu --example server [CLIENTS [REQUESTS]]`

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use swiglu::{DType, Device, Matrix, MatrixMut, MatrixRef, Mlp, Numerics};

const FILE: &str = swiglu_fixtures::STORIES15M_FILE;
const MOST: usize = 64;

/// A token, and where its result is wanted.
struct Request {
    x: Vec<f32>,
    reply: SyncSender<swiglu::Result<Vec<f32>>>,
}

/// Answers until nobody is left to ask, and returns the calls it took. Nothing is allocated for a call but the replies.
fn serve(mlp: &Mlp, requests: Receiver<Request>) -> swiglu::Result<usize> {
    let k = mlp.hidden();
    mlp.reserve(MOST, 1)?;
    let (mut x, mut y) = (Matrix::<f32>::zeros(MOST, k)?, Matrix::<f32>::zeros(MOST, k)?);
    let mut batch: Vec<Request> = Vec::with_capacity(MOST);
    let mut calls = 0;
    while let Ok(first) = requests.recv() {
        batch.push(first);
        batch.extend(requests.try_iter().take(MOST - 1));
        let m = batch.len();
        for (request, row) in batch.iter().zip(x.as_mut_slice().chunks_exact_mut(k)) {
            row.copy_from_slice(&request.x);
        }
        let rows = MatrixRef::new(&x.as_slice()[..m * k], m, k)?;
        let out = MatrixMut::new(&mut y.as_mut_slice()[..m * k], m, k)?;
        let outcome = mlp.forward_into(rows, out);
        for (request, row) in batch.drain(..).zip(y.as_slice().chunks_exact(k)) {
            // One failure is everybody's. Who has gone does not want the reply.
            let _ = request.reply.send(outcome.clone().map(|()| row.to_vec()));
        }
        calls += 1;
    }
    Ok(calls)
}

/// Asks for so many tokens, one after the other, and returns how long each took.
fn ask(mlp: &Mlp, server: &Sender<Request>, client: usize, count: usize) -> Vec<Duration> {
    let token =
        |i: usize| (0..mlp.hidden()).map(move |k| ((client * 7 + i * 3 + k) % 23) as f32 / 23.0);
    (0..count)
        .map(|i| {
            let (reply, answer) = sync_channel(1);
            let (x, start) = (token(i).collect::<Vec<f32>>(), Instant::now());
            server.send(Request { x: x.clone(), reply }).expect("the server waits for requests");
            let y = answer.recv().expect("every request is answered").expect("the layer computes");
            let took = start.elapsed();
            let alone = mlp.forward(MatrixRef::row_vector(&x)).expect("the layer computes");
            assert_eq!(y, alone.as_slice(), "a batch has changed a bit");
            took
        })
        .collect()
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).filter(|_| !cfg!(test)).map(|arg| arg.parse());
    let (clients, count) = (args.next().unwrap_or(Ok(16))?, args.next().unwrap_or(Ok(50))?);
    let numerics = Numerics::default_for(DType::F32).with_batch_invariance();
    let mlp = Mlp::load(FILE, 0)?.dtype(DType::F32).numerics(numerics).to(&Device::cpu()?)?;
    let (sender, requests) = channel();
    let start = Instant::now();
    let (calls, mut times) = thread::scope(|s| {
        let (mlp, server) = (&mlp, s.spawn(|| serve(&mlp, requests)));
        let asking: Vec<_> = (0..clients)
            .map(|client| (client, sender.clone()))
            .map(|(client, sender)| s.spawn(move || ask(mlp, &sender, client, count)))
            .collect();
        drop(sender);
        let times: Vec<Duration> =
            asking.into_iter().flat_map(|t| t.join().expect("a client asks to its end")).collect();
        (server.join().expect("the server serves to its end"), times)
    });
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    let (n, calls) = (times.len(), calls?);
    println!(
        "{n} requests in {calls} calls ({:.1} tokens a call), {:.0} a second; median {:?}, 99 % within {:?}",
        n as f64 / calls as f64,
        n as f64 / start.elapsed().as_secs_f64(),
        at(0.5),
        at(0.99)
    );
    Ok(())
}
