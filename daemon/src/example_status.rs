//! A status as a healthy daemon gives it, for tests.

use std::collections::BTreeMap;
use tidelock_daemon_core::stats::{LatencyHistogram, LatencySnapshot};
use tidelock_daemon_core::status::*;
use tidelock_protocol::ids::{Epoch, Seq};
use tidelock_protocol::message::{Form, Mode};

fn times(ms: &[u64]) -> LatencySnapshot {
    let histogram = LatencyHistogram::default();
    ms.iter().for_each(|ms| histogram.record(ms * 1_000_000));
    histogram.snapshot()
}

pub(crate) fn status() -> Status {
    let disk = DiskStatus {
        name: "root".into(),
        path: "/var/lib/vms/db.img".into(),
        size_bytes: 40 << 30,
        socket: "/run/tidelock/shop/db/root.sock".into(),
    };
    let writer = WriterStatus {
        disks: vec![disk],
        pending: Seq(1_012),
        committed: Seq(1_000),
        lag: LagStatus { writes: 12, bytes: 48 << 10, ms: 52 },
        backup_has_all: false,
        backlog: BacklogStatus {
            used_bytes: 1 << 20,
            limit_bytes: 256 << 20,
            writes_wait: false,
            waiting_requests: 0,
            full_count: 0,
            on_disk: None,
        },
        copy: None,
        commit_latency: times(&[52, 52, 60]),
        guest_io: GuestIo { reads: 5, writes: 1_012, connections: 1, ..GuestIo::default() },
        clock_refused_ms: None,
        clock_lead_ms: 0,
        activity: ActivityStatus {
            compares: ActivityCompares::Map,
            because: None,
            exposed_bytes: 37 << 20,
            entries: 37,
            hits: 971,
            misses: 41,
            transactions: 40,
            overflows: 0,
        },
        verify: VerifyStatus { every_ms: Some(7 * 86_400_000), ..VerifyStatus::default() },
        heartbeat: HeartbeatStatus {
            interval_ms: Some(1_000),
            alarm_after_ms: Some(5_000),
            age_ms: Some(230),
            returned: 11_000,
            sent: 9_000,
            missing: None,
        },
        disk_hang: None,
    };
    let gate = GateStatus {
        interface: "tap0".into(),
        open: true,
        shut_because: None,
        held_packets: 4,
        held_bytes: 6_000,
        oldest_hold_ms: 48,
        released_packets: 900,
        passed_packets: 5_000,
        dropped_packets: 0,
        rules_restored: 0,
        may_have_left: 0,
        unheld_because: None,
        unwatched_because: None,
        hold_time: times(&[50, 70]),
    };
    let tagging = TaggingStatus {
        tagged_packets: 700,
        here_packets: 40,
        covered_packets: 1_200,
        merged_packets: 650,
        foreign_packets: 0,
        gated_packets: BTreeMap::from([("no_room".into(), 0), ("mtu".into(), 3)]),
        dropped_packets: BTreeMap::from([("malformed".into(), 0)]),
    };
    let group = GroupStatus {
        name: "shop".into(),
        protected: true,
        risk: Risk {
            undoes: Undoes::Lag(LagStatus { writes: 12, bytes: 48 << 10, ms: 52 }),
            told: None,
            why: Why {
                kind: Kind::Following,
                text: "the backup has every write but those on their way".into(),
            },
        },
        why_age_ms: 11_400_000,
        detail: None,
        mode: Mode::Pipelined,
        wanted_mode: Mode::Pipelined,
        configured_mode: Mode::Pipelined,
        when_unreachable: "hold".into(),
        switched_over_unix_ms: None,
        awaits_adoption: false,
        epoch: Epoch(1),
        lease: LeaseStatus { held: true, left_ms: 8_100, period_ms: 10_000, grace_ms: 15_000 },
        members: vec![MemberStatus {
            name: "db".into(),
            writer: Some(writer),
            gates: vec![gate],
            roles: vec![Role::Writer],
            tagging: Some(tagging),
        }],
        elsewhere: vec![ElsewhereStatus {
            name: "web".into(),
            host: Some("host-b".into()),
            roles: vec![Role::Outbound],
        }],
        form: Some(Form::Hlc),
        tagged: true,
        watermark_lag_ms: Some(60),
    };
    Status {
        schema: SCHEMA,
        host: "host-a".into(),
        software: "tidelockd 0.1.0".into(),
        uptime_ms: 11_520_000,
        virtual_machine: None,
        link: LinkStatus {
            backup: "backup.example.org:9640".into(),
            state: LinkState::Connected,
            state_age_ms: 11_520_000,
            tls: true,
            certificate_valid_s: Some(400 * 86_400),
            connects: 1,
            problem: None,
            retry_in_ms: None,
        },
        groups: vec![group],
    }
}
