//! The peer's side of the conversation.

use std::io::{self, BufRead, Write};

use super::protocol::{Reply, Request};

/// Answers requests on standard input, a line each, on standard output: until the input ends or `answer` has none.
///
/// # Errors
/// What reading or writing failed with; [`io::ErrorKind::InvalidData`] for a line that is no request.
pub fn serve(mut answer: impl FnMut(&Request) -> Option<Reply>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let request = serde_json::from_str(&line).map_err(|e| {
            io::Error::new(io::ErrorKind::InvalidData, format!("request `{line}`: {e}"))
        })?;
        let Some(reply) = answer(&request) else { return Ok(()) };
        writeln!(out, "{}", serde_json::to_string(&reply)?)?;
        out.flush()?;
    }
    Ok(())
}
