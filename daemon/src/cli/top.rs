//! `tidelock top`: the status live.
//!
//! [`View`] takes snapshots and keys and draws itself; the loop around it does the I/O.

use super::human;
use super::paint::{Paint, Tone, tone_of};
use super::status_text::{elsewhere, heartbeat, latency, risk, risk_tone, tags, word};
use crate::control::Client;
use anyhow::Context;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Sparkline, Table, Wrap};
use std::collections::{HashMap, VecDeque};
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};
use tidelock_daemon_core::status::{GroupStatus, LinkState, MemberStatus, Status};

/// How many looks are remembered: more than a wide terminal has columns.
const HISTORY_MAX: usize = 512;
/// From so many columns on the table of groups has all of its columns.
const WIDE: u16 = 100;
/// Columns that the wrapping of a group's lines may leave empty in a row: the length of a long word.
const LONG_WORD: usize = 12;

/// Shows the status until the operator has seen enough.
pub fn run(socket: &Path, interval: Duration) -> anyhow::Result<()> {
    anyhow::ensure!(
        std::io::stdout().is_terminal(),
        "top needs a terminal; `tidelock status --json` is for scripts"
    );
    // The first look is made before the screen changes: its error should stay readable.
    let mut client = Some(Client::connect(socket)?);
    let mut view = View::default();
    view.look(&mut client, socket);
    let mut terminal = ratatui::try_init().context("cannot take over the terminal")?;
    let outcome = watch(&mut terminal, &mut view, &mut client, socket, interval);
    ratatui::restore();
    outcome
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut View,
    client: &mut Option<Client>,
    socket: &Path,
    interval: Duration,
) -> anyhow::Result<()> {
    let mut next_look = Instant::now() + interval;
    loop {
        terminal.draw(|frame| view.draw(frame))?;
        let left = next_look.saturating_duration_since(Instant::now());
        if event::poll(left)? {
            if let Event::Key(key) = event::read()?
                && view.key(key) == Next::End
            {
                return Ok(());
            }
        } else {
            view.look(client, socket);
            next_look = Instant::now() + interval;
        }
    }
}

/// What a key leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Continue,
    End,
}

/// One look at one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    uptime_ms: u64,
    lag_ms: u64,
    lag_bytes: u64,
    held_packets: u64,
    writes: u64,
    written_bytes: u64,
    reads: u64,
}

impl Sample {
    fn of(status: &Status, group: &GroupStatus) -> Self {
        let mut sample = Self { uptime_ms: status.uptime_ms, ..Self::default() };
        for member in &group.members {
            if let Some(writer) = &member.writer {
                sample.lag_ms = sample.lag_ms.max(writer.lag.ms);
                sample.lag_bytes += writer.lag.bytes;
                sample.writes += writer.guest_io.writes;
                sample.written_bytes += writer.guest_io.written_bytes;
                sample.reads += writer.guest_io.reads;
            }
            sample.held_packets += member.gates.iter().map(|gate| gate.held_packets).sum::<u64>();
        }
        sample
    }
}

/// What is shown.
#[derive(Debug, Default)]
struct View {
    status: Option<Status>,
    problem: Option<String>,
    history: HashMap<String, VecDeque<Sample>>,
    selected: usize,
}

impl View {
    /// Looks at the daemon; when it does not answer, says so and tries again next time.
    fn look(&mut self, client: &mut Option<Client>, socket: &Path) {
        let mut connected = match client.take() {
            Some(connected) => Ok(connected),
            None => Client::connect(socket),
        };
        match connected.as_mut().map(Client::status) {
            Ok(Ok(status)) => {
                self.take(status);
                *client = connected.ok();
            }
            Ok(Err(error)) => self.problem = Some(error.to_string()),
            Err(error) => self.problem = Some(error.to_string()),
        }
    }

    fn take(&mut self, status: Status) {
        self.problem = None;
        // A daemon that has started again counts from zero.
        if self.status.as_ref().is_some_and(|before| before.uptime_ms > status.uptime_ms) {
            self.history.clear();
        }
        self.history.retain(|name, _| status.groups.iter().any(|group| group.name == *name));
        for group in &status.groups {
            let history = self.history.entry(group.name.clone()).or_default();
            if history.len() == HISTORY_MAX {
                history.pop_front();
            }
            history.push_back(Sample::of(&status, group));
        }
        self.selected = self.selected.min(status.groups.len().saturating_sub(1));
        self.status = Some(status);
    }

    fn key(&mut self, key: KeyEvent) -> Next {
        if key.kind == KeyEventKind::Release {
            return Next::Continue;
        }
        let last = self.status.as_ref().map_or(0, |status| status.groups.len().saturating_sub(1));
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Next::End,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                return Next::End;
            }
            KeyCode::Down | KeyCode::Char('j') => self.selected = (self.selected + 1).min(last),
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            _ => {}
        }
        Next::Continue
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let groups = self.status.as_ref().map_or(0, |status| status.groups.len());
        // Never so long that the selected group's figures have no room.
        let table = u16::try_from(groups).unwrap_or(u16::MAX).saturating_add(2).min(12);
        let [head, list, detail, foot] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(table),
            Constraint::Min(0),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new("q quit   up/down choose a group").dim(), foot);
        self.draw_head(frame, head);
        let Some(status) = &self.status else { return };
        self.draw_groups(frame, list, status);
        if let Some(group) = status.groups.get(self.selected) {
            self.draw_detail(frame, detail, group);
        }
    }

    fn draw_head(&self, frame: &mut Frame<'_>, area: Rect) {
        let mut lines = Vec::new();
        if let Some(status) = &self.status {
            let (word, tone) = match status.link.state {
                LinkState::Connected => ("connected to", Tone::Good),
                LinkState::Connecting => ("connecting to", Tone::Watch),
                LinkState::Disconnected => ("DISCONNECTED from", Tone::Bad),
            };
            lines.push(Line::from(vec![
                Span::from(status.host.clone()).bold(),
                format!("  up {}  link ", human::ms(status.uptime_ms)).into(),
                Span::styled(word, style(tone)),
                format!(" {} for {}", status.link.backup, human::ms(status.link.state_age_ms))
                    .into(),
            ]));
        }
        let problem = self.status.as_ref().and_then(|status| status.link.problem.clone());
        let problem = self.problem.clone().or(problem);
        lines.extend(problem.map(|text| Line::styled(text, style(Tone::Bad))));
        frame.render_widget(Paragraph::new(lines), area);
    }

    fn draw_groups(&self, frame: &mut Frame<'_>, area: Rect, status: &Status) {
        // On a narrow terminal the group's name comes before its rates.
        let wide = area.width >= WIDE;
        let columns = [
            ("group", Constraint::Fill(1), true),
            ("state", Constraint::Length(18), true),
            ("mode", Constraint::Length(9), true),
            ("lag", Constraint::Length(9), true),
            ("age", Constraint::Length(11), wide),
            ("held", Constraint::Length(7), true),
            ("writes/s", Constraint::Length(8), true),
            ("written", Constraint::Length(11), wide),
        ];
        let shown = |nth: usize| columns[nth].2;
        let rows = status.groups.iter().enumerate().map(|(index, group)| {
            let sample = Sample::of(status, group);
            let (writes_per_s, bytes_per_s) = self.rates(&group.name);
            let mark = if index == self.selected { ">" } else { " " };
            let cells = [
                Span::from(format!("{mark}{}", group.name)).bold(),
                Span::styled(word(group).to_uppercase(), style(tone_of(group))),
                group.mode.to_string().into(),
                human::bytes(sample.lag_bytes).into(),
                human::ms(sample.lag_ms).into(),
                sample.held_packets.to_string().into(),
                writes_per_s.to_string().into(),
                human::rate(bytes_per_s).into(),
            ];
            let cells = cells.into_iter().enumerate().filter(|(nth, _)| shown(*nth));
            Row::new(cells.map(|(_, cell)| cell))
        });
        let columns = columns.iter().filter(|(_, _, is_shown)| *is_shown);
        let header = Row::new(columns.clone().map(|(name, _, _)| *name)).dim();
        let widths = columns.map(|(_, width, _)| *width);
        frame.render_widget(Table::new(rows, widths).header(header), area);
    }

    /// Writes and bytes per second between the last two looks.
    fn rates(&self, group: &str) -> (u64, u64) {
        let history = self.history.get(group);
        let Some((now, before)) = history.and_then(|history| {
            let now = history.back()?;
            Some((now, history.iter().rev().nth(1)?))
        }) else {
            return (0, 0);
        };
        let ms = now.uptime_ms.saturating_sub(before.uptime_ms).max(1);
        let per_s = |now: u64, before: u64| {
            u64::try_from(u128::from(now.saturating_sub(before)) * 1000 / u128::from(ms))
                .unwrap_or(u64::MAX)
        };
        (per_s(now.writes, before.writes), per_s(now.written_bytes, before.written_bytes))
    }

    fn draw_detail(&self, frame: &mut Frame<'_>, area: Rect, group: &GroupStatus) {
        let text = detail_lines(group);
        let height = wrapped_height(&text, area.width);
        let gauges = gauges(group);
        let [words, bars, plots] = Layout::vertical([
            Constraint::Length(height),
            Constraint::Length(u16::try_from(gauges.len()).unwrap_or(u16::MAX)),
            Constraint::Min(0),
        ])
        .areas(area);
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: false }), words);
        let rows = Layout::vertical(gauges.iter().map(|_| Constraint::Length(1))).split(bars);
        for (gauge, row) in gauges.into_iter().zip(rows.iter()) {
            frame.render_widget(gauge, *row);
        }
        let [left, right] =
            Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(plots);
        self.plot(frame, left, &group.name, "lag, ms", |sample| sample.lag_ms);
        self.plot(frame, right, &group.name, "held packets", |sample| sample.held_packets);
    }

    fn plot(
        &self,
        frame: &mut Frame<'_>,
        area: Rect,
        group: &str,
        title: &str,
        value: fn(&Sample) -> u64,
    ) {
        let Some(history) = self.history.get(group) else { return };
        let columns = usize::from(area.width.saturating_sub(2));
        let skip = history.len().saturating_sub(columns);
        let values: Vec<_> = history.iter().skip(skip).map(value).collect();
        let most = values.iter().max().copied().unwrap_or(0);
        let block = Block::bordered().title(format!(" {title} (most {most}) "));
        frame.render_widget(Sparkline::default().block(block).data(&values), area);
    }
}

/// Rows that lines take when they are wrapped between words, or a few more.
fn wrapped_height(lines: &[Line<'_>], width: u16) -> u16 {
    let width = usize::from(width).max(1);
    let rows = |line: &Line<'_>| match line.width() {
        fits if fits <= width => 1,
        // A word that no longer fits leaves so much of its row empty.
        wraps => wraps.div_ceil(width.saturating_sub(LONG_WORD).max(1)),
    };
    u16::try_from(lines.iter().map(rows).sum::<usize>()).unwrap_or(u16::MAX)
}

fn detail_lines(group: &GroupStatus) -> Vec<Line<'static>> {
    let mut lines = vec![Line::from(group.risk.why.text.to_string()).style(style(tone_of(group)))];
    lines.extend(group.detail.clone().map(Line::from));
    let text = format!("a disaster now would undo {}", risk(&group.risk));
    lines.push(Line::styled(text, style(risk_tone(group))));
    lines
        .extend(tags(group).map(|(text, tone)| Line::styled(format!("tags  {text}"), style(tone))));
    for member in &group.members {
        lines.extend(member_line(member).map(Line::from));
        let beat = member.writer.as_ref().and_then(|writer| heartbeat(&writer.heartbeat));
        lines.extend(beat.map(|(text, tone)| {
            Line::styled(format!("{}  heartbeat: {text}", member.name), style(tone))
        }));
    }
    lines.extend(group.elsewhere.iter().map(|member| elsewhere(member, Paint::PLAIN).into()));
    lines
}

fn member_line(member: &MemberStatus) -> Option<String> {
    let commits = member.writer.as_ref().and_then(|writer| latency(&writer.commit_latency));
    let holds = member.gates.iter().map(|gate| {
        let state = if gate.open { "open" } else { "SHUT" };
        let times = latency(&gate.hold_time).unwrap_or_else(|| "nothing held yet".into());
        format!("gate {} {state}: {times}", gate.interface)
    });
    let commits = commits.map(|text| format!("commits: {text}"));
    let parts: Vec<_> = commits.into_iter().chain(holds).collect();
    (!parts.is_empty()).then(|| format!("{}  {}", member.name, parts.join("  ")))
}

fn gauges(group: &GroupStatus) -> Vec<Gauge<'static>> {
    let mut gauges = Vec::new();
    for (member, writer) in
        group.members.iter().filter_map(|member| Some((member, member.writer.as_ref()?)))
    {
        let backlog = writer.backlog;
        let share = backlog.used_bytes as f64 / backlog.limit_bytes.max(1) as f64;
        let waits = if backlog.writes_wait { "  FULL: writes wait" } else { "" };
        let label = format!(
            "{} backlog {} of {}{waits}",
            member.name,
            human::bytes(backlog.used_bytes),
            human::bytes(backlog.limit_bytes)
        );
        let tone = if backlog.writes_wait { Tone::Bad } else { Tone::Good };
        gauges.push(gauge(share, label, tone));
        if let Some(copy) = &writer.copy {
            let left =
                copy.left_ms.map_or("standing still".into(), |left| human::ms(left) + " left");
            let rate = human::rate(copy.rate_bytes_per_s);
            let label = format!("{} {} {rate}, {left}", member.name, copy.kind);
            gauges.push(gauge(copy.share(), label, Tone::Watch));
        }
    }
    gauges
}

fn gauge(share: f64, label: String, tone: Tone) -> Gauge<'static> {
    Gauge::default().ratio(share.clamp(0.0, 1.0)).label(label).gauge_style(style(tone))
}

fn style(tone: Tone) -> Style {
    match tone {
        Tone::Good => Style::new().fg(Color::Green),
        Tone::Watch => Style::new().fg(Color::Yellow),
        Tone::Bad => Style::new().fg(Color::Red).bold(),
        Tone::Faint => Style::new().dim(),
        Tone::Strong => Style::new().bold(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example_status::status;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use tidelock_daemon_core::status::{CopyKindStatus, CopyStatus, Kind, Why};

    fn screen(view: &View) -> String {
        screen_of(view, 110)
    }

    fn screen_of(view: &View, width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 24)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn what_matters_is_on_the_screen() {
        let mut view = View::default();
        let mut now = status();
        view.take(now.clone());
        now.uptime_ms += 500;
        let writer = now.groups[0].members[0].writer.as_mut().unwrap();
        writer.guest_io.writes += 1_000;
        writer.guest_io.written_bytes += 4 << 20;
        writer.copy = Some(CopyStatus {
            kind: CopyKindStatus::Initial,
            done_bytes: 1 << 30,
            total_bytes: 4 << 30,
            rate_bytes_per_s: 100 << 20,
            left_ms: Some(30_720),
            because: None,
        });
        now.groups[0].protected = false;
        now.groups[0].risk.why =
            Why { kind: Kind::Copying, text: "nothing can be recovered yet".into() };
        view.take(now);
        let screen = screen(&view);
        for text in [
            "host-a",
            "connected to",
            ">shop",
            "COPYING",
            "nothing can be recovered yet",
            "a disaster now would undo the lag: 12 writes",
            "2000",
            "8 MiB/s",
            "db backlog 1 MiB of 256 MiB",
            "db initial copy 100 MiB/s, 30.7 s left",
            "lag, ms (most 52)",
            "held packets (most 4)",
            "gate tap0 open",
            "db  heartbeat: the last that came back was sent 230 ms ago",
            "tags  HLC, watermark 60 ms behind",
            "web: outbound on host-b",
            "q quit",
        ] {
            assert!(screen.contains(text), "{text} is missing:\n{screen}");
        }
    }

    #[test]
    fn a_daemon_that_is_gone_is_said_and_the_last_look_stays() {
        let mut view = View::default();
        view.take(status());
        view.look(&mut None, Path::new("/nonexistent/control.sock"));
        let screen = screen(&view);
        assert!(screen.contains("no daemon answers") && screen.contains("shop"), "{screen}");
    }

    #[test]
    fn keys_choose_and_end() {
        let mut view = View::default();
        let mut two = status();
        two.groups.push(two.groups[0].clone());
        two.groups[1].name = "other".into();
        view.take(two);
        assert_eq!(view.key(KeyCode::Down.into()), Next::Continue);
        assert!(screen(&view).contains(">other"));
        view.key(KeyCode::Down.into());
        view.key(KeyCode::Up.into());
        assert!(screen(&view).contains(">shop"));
        assert_eq!(view.key(KeyCode::Char('q').into()), Next::End);
    }

    #[test]
    fn history_is_bounded_and_starts_anew_with_the_daemon() {
        let mut view = View::default();
        for uptime_ms in 1..=HISTORY_MAX as u64 + 10 {
            view.take(Status { uptime_ms, ..status() });
        }
        assert_eq!(view.history["shop"].len(), HISTORY_MAX);
        view.take(Status { uptime_ms: 1, ..status() });
        assert_eq!(view.history["shop"].len(), 1);
    }

    #[test]
    fn at_80_columns_the_name_is_there_and_no_sentence_is_cut() {
        let mut view = View::default();
        let mut now = status();
        now.groups[0].name = "accounting-database".into();
        now.groups[0].detail = Some(format!("{}the end of it", "a long sentence ".repeat(6)));
        view.take(now);
        let screen = screen_of(&view, 80);
        for part in [">accounting-database", "PROTECTED", "writes/s", "the end of it"] {
            assert!(screen.contains(part), "{part} in\n{screen}");
        }
    }

    #[test]
    fn a_tiny_terminal_is_no_reason_to_fall_over() {
        let mut view = View::default();
        view.take(status());
        for (width, height) in [(1, 1), (10, 3), (200, 2)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| view.draw(frame)).unwrap();
        }
    }
}
