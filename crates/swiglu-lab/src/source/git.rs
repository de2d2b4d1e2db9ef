//! What git is asked.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// What git prints; none where it fails.
pub(super) fn git(dir: &Path, arguments: &[&str]) -> Option<Vec<u8>> {
    let output = command(dir, arguments).output().ok()?;
    output.status.success().then_some(output.stdout)
}

/// What git ends with a zero byte.
pub(super) fn parts(listed: &[u8]) -> impl Iterator<Item = &[u8]> {
    listed.split(|&byte| byte == 0).filter(|part| !part.is_empty())
}

/// The contents of blobs, in their order.
pub(super) fn blobs(root: &Path, names: &[&str]) -> Option<Vec<Vec<u8>>> {
    if names.is_empty() {
        return Some(Vec::new());
    }
    let mut child = command(root, &["cat-file", "--batch"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut asked = child.stdin.take()?;
    let questions = names.iter().flat_map(|name| [name, "\n"]).collect::<String>();
    // It answers while it is asked: neither pipe may fill up.
    let (written, output) = std::thread::scope(|scope| {
        let writer = scope.spawn(move || asked.write_all(questions.as_bytes()));
        let output = child.wait_with_output();
        (writer.join(), output)
    });
    written.ok()?.ok()?;
    let output = output.ok().filter(|output| output.status.success())?;
    let mut rest = output.stdout.as_slice();
    let mut blobs = Vec::with_capacity(names.len());
    for _ in names {
        // `HASH blob LENGTH<newline>`, the contents, a newline.
        let end = rest.iter().position(|&byte| byte == b'\n')?;
        let facts = std::str::from_utf8(&rest[..end]).ok()?;
        let length: usize = facts.rsplit(' ').next()?.parse().ok()?;
        blobs.push(rest.get(end + 1..end + 1 + length)?.to_vec());
        rest = rest.get(end + 2 + length..)?;
    }
    Some(blobs)
}

fn command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    // A clone without old blobs stays without them: nobody waits for a network here.
    command.arg("-C").arg(dir).args(arguments).env("GIT_NO_LAZY_FETCH", "1");
    command
}
