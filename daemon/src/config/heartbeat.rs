//! `[group.heartbeat]`: how soon it is found that replication has stopped without a word.

use std::borrow::Cow;
use std::time::Duration;

use tidelock_config::{FromToml, Section, Value, Wrong, format_duration};
use tidelock_daemon_core::heartbeat::HeartbeatSettings;

const INTERVAL_DEFAULT: Duration = HeartbeatSettings::DEFAULT.interval;
const INTERVAL_MIN: Duration = Duration::from_millis(100);
const INTERVAL_MAX: Duration = Duration::from_secs(60);

const ALARM_DEFAULT: Duration = HeartbeatSettings::DEFAULT.alarm_after;
/// Round trips, and a backup's slow disk, are no silence.
const ALARM_MIN: Duration = Duration::from_secs(1);
const ALARM_MAX: Duration = Duration::from_secs(3600);
/// One that is late is not missing yet.
const ALARM_MIN_INTERVALS: u32 = 3;
const ALARM_DEFAULT_INTERVALS: u32 = 5;

/// How often; `None`: never.
struct Interval(Option<Duration>);

impl FromToml for Interval {
    fn wanted() -> Cow<'static, str> {
        "\"1s\" or \"off\"".into()
    }

    fn from_toml(value: &Value<'_>) -> Result<Self, Wrong> {
        match value {
            Value::String("off") => Ok(Self(None)),
            Value::String(_) => Ok(Self(Some(Duration::from_toml(value)?))),
            _ => Err(value.is_not(&Self::wanted())),
        }
    }
}

pub(super) fn read_heartbeat(section: &mut Section<'_>) -> Option<HeartbeatSettings> {
    let interval = section.or("interval", Interval(Some(INTERVAL_DEFAULT)));
    let alarm_after = section.optional::<Duration>("alarm_after");
    let Interval(Some(every)) = interval.value else {
        if let Some(alarm_after) = &alarm_after {
            let what = "`alarm_after` in [group.heartbeat]: none is sent, so none is missed";
            section.fail(&alarm_after.place, what, "no `alarm_after`, or an interval");
        }
        return None;
    };
    if !(INTERVAL_MIN..=INTERVAL_MAX).contains(&every) {
        let what = format!(
            "`interval` in [group.heartbeat]: {} is not between {} and {}",
            format_duration(every),
            format_duration(INTERVAL_MIN),
            format_duration(INTERVAL_MAX)
        );
        let instead = format!("\"{}\", or \"off\"", format_duration(INTERVAL_DEFAULT));
        section.fail(&interval.place, what, instead);
    }
    let least = ALARM_MIN.max(every * ALARM_MIN_INTERVALS);
    if let Some(alarm_after) = &alarm_after
        && !(least..=ALARM_MAX).contains(&alarm_after.value)
    {
        let what = format!(
            "`alarm_after` in [group.heartbeat]: {} is not between {} ({ALARM_MIN_INTERVALS} intervals, {} at \
             least) and {}",
            format_duration(alarm_after.value),
            format_duration(least),
            format_duration(ALARM_MIN),
            format_duration(ALARM_MAX)
        );
        section.fail(&alarm_after.place, what, format!("\"{}\"", format_duration(usual(every))));
    }
    let alarm_after = alarm_after.map_or_else(|| usual(every), |alarm_after| alarm_after.value);
    Some(HeartbeatSettings { interval: every, alarm_after })
}

fn usual(interval: Duration) -> Duration {
    ALARM_DEFAULT.max(interval * ALARM_DEFAULT_INTERVALS)
}
