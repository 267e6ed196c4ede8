//! Asks before something that gives up a promise.

use anyhow::{Context, bail};
use std::io::{BufRead, IsTerminal, Write};

/// Says what follows, and asks; only `yes` is yes. A script, which has no terminal, is refused: it says `--yes`.
pub fn confirm(consequence: &str, question: &str, refused: &str) -> anyhow::Result<()> {
    let (stdin, mut stderr) = (std::io::stdin(), std::io::stderr());
    let is_terminal = stdin.is_terminal();
    ask(consequence, question, refused, &mut stdin.lock(), &mut stderr, is_terminal)
}

fn ask(
    consequence: &str,
    question: &str,
    refused: &str,
    answers: &mut dyn BufRead,
    questions: &mut dyn Write,
    is_terminal: bool,
) -> anyhow::Result<()> {
    if !is_terminal {
        bail!("{consequence} Say --yes if this is meant.");
    }
    write!(questions, "{consequence}\n{question} Type yes: ").context("cannot ask")?;
    questions.flush().context("cannot ask")?;
    let mut answer = String::new();
    answers.read_line(&mut answer).context("cannot read the answer")?;
    if answer.trim() == "yes" { Ok(()) } else { bail!("{refused}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_yes_is_yes() {
        let ask = |answer: &str, terminal| {
            let mut asked = Vec::new();
            let said = ask("This.", "So?", "no", &mut answer.as_bytes(), &mut asked, terminal);
            (said.map_err(|error| error.to_string()), String::from_utf8(asked).unwrap())
        };
        let asked = "This.\nSo? Type yes: ".to_owned();
        assert_eq!(ask("yes\n", true), (Ok(()), asked.clone()));
        for no in ["", "y\n", "no\n", "YES\n"] {
            assert_eq!(ask(no, true), (Err("no".to_owned()), asked.clone()), "{no:?}");
        }
        let (said, asked) = ask("yes\n", false);
        assert!(said.unwrap_err().contains("--yes") && asked.is_empty());
    }
}
