//! Runs the packet filters' own tools.

use super::RulesError;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where such tools live. PATH is not asked: a daemon may have any.
const DIRECTORIES: [&str; 6] =
    ["/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin", "/run/current-system/sw/bin"];

/// The absolute path of a tool.
pub(super) fn find(name: &str) -> Option<PathBuf> {
    DIRECTORIES.iter().map(|dir| Path::new(dir).join(name)).find(|path| path.is_file())
}

/// Runs a tool with `input` on its standard input and returns what it printed.
pub(super) fn run(
    tool: &Path,
    arguments: &[&str],
    input: &str,
    doing: &'static str,
) -> Result<String, RulesError> {
    let name = || tool.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let cannot = |source| RulesError::Run { tool: name(), source };
    let mut child = Command::new(tool)
        .args(arguments)
        .env_clear()
        .env("LC_ALL", "C")
        .env("PATH", DIRECTORIES.join(":"))
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(cannot)?;
    if let Some(mut stdin) = child.stdin.take() {
        // Scripts are far smaller than a pipe holds. A tool that does not read its input says
        // why with its exit status.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(cannot)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    if said.contains("Permission denied") || said.contains("Operation not permitted") {
        return Err(RulesError::NotAllowed { tool: name() });
    }
    Err(RulesError::Refused { tool: name(), doing, output: said })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_tool_says_is_passed_on() {
        let sh = find("sh").expect("a shell");
        assert!(sh.is_absolute());
        let echoed = run(&sh, &["-c", "cat; echo done"], "input\n", "echo").unwrap();
        assert_eq!(echoed, "input\ndone\n");
        let error = run(&sh, &["-c", "echo no  such; echo no such >&2; exit 2"], "", "try it");
        assert_eq!(error.unwrap_err().to_string(), "sh could not try it: no such");
        let error = run(&sh, &["-c", "echo 'Operation not permitted' >&2; exit 4"], "", "try it");
        assert!(matches!(error, Err(RulesError::NotAllowed { .. })));
        assert!(find("no-such-tool").is_none());
    }
}
