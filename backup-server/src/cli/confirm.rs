//! Asks before something that cannot be taken back.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, IsTerminal, Write};

/// Says what follows, and asks; only `yes` is yes. A script, which has no terminal, is refused: it says `--yes`.
pub(super) fn confirm(consequence: &str, question: &str, refused: &str) -> Result<()> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        bail!("{consequence} Say --yes if this is meant.");
    }
    let mut stderr = std::io::stderr();
    write!(stderr, "{consequence}\n{question} Type yes: ").context("cannot ask")?;
    stderr.flush().context("cannot ask")?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer).context("cannot read the answer")?;
    if answer.trim() == "yes" { Ok(()) } else { bail!("{refused}") }
}
