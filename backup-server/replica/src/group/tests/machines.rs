//! Machine descriptions are on stable storage before anybody is answered.

use super::*;

fn machine(memory_mib: u64) -> tidelock_protocol::machine::Machine {
    serde_json::from_value(serde_json::json!({ "memory_mib": memory_mib })).unwrap()
}

fn described(incarnation: u64, memory_mib: u64) -> Attach {
    let last_run = LastRun::Clean { seq: Seq(0), served: false };
    Attach { machine: Some(machine(memory_mib)), ..attach_message(incarnation, 0, last_run) }
}

fn kept(disk: &Memory) -> (Option<u64>, Option<u64>) {
    let KeptMachine { described, approved } = reopen(&disk.crash(&mut || false)).machine("vm");
    (described.map(|of| of.memory_mib), approved.map(|of| of.memory_mib))
}

#[test]
fn a_host_is_attached_when_its_description_is_on_stable_storage() {
    let disk = Memory::new();
    let mut group = create(&disk).unwrap();
    assert!(group.try_attach(at_ms(0), LINK, "host-a", &described(1, 64)).is_err());
    assert_eq!((attached(&group.take_outputs()), kept(&disk)), (None, (None, None)));
    group.flush();
    group.try_attach(at_ms(0), LINK, "host-a", &described(1, 64)).unwrap();
    assert!(attached(&group.take_outputs()).is_some());
    assert_eq!(kept(&disk), (Some(64), None));
    group.attach(at_ms(0), LINK, "host-a", &described(1, 64));
    assert!(attached(&group.take_outputs()).is_some());
    let bytes = group.journal().bytes();
    group.attach(at_ms(0), LINK, "host-a", &described(1, 64));
    assert!(attached(&group.take_outputs()).is_some());
    assert_eq!(group.journal().bytes(), bytes, "what is known is not said again");
    // Without room nothing waits in memory, however often it is asked.
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    for n in 0..100 {
        group.attach(at_ms(0), LINK, "host-a", &described(1, 100 + n));
        let refused = refusal(&group.take_outputs());
        assert_eq!(refused, Some((LINK, RefusalKind::Stopping)), "{n}");
    }
    assert!(group.journal().staged_bytes() < 1000);
    disk.set_faults(Faults::default());
    group.retry();
    group.attach(at_ms(0), LINK, "host-a", &described(1, 32));
    assert!(attached(&group.take_outputs()).is_some());
    assert_eq!(kept(&disk), (Some(32), None));
}

#[test]
fn an_approval_is_answered_when_it_is_on_stable_storage() {
    let disk = Memory::new();
    let mut group = create(&disk).unwrap();
    group.attach(at_ms(0), LINK, "host-a", &described(1, 64));
    let unknown = group.approve("web", &machine(64)).unwrap_err().to_string();
    assert!(unknown.contains("it has: vm"), "{unknown}");
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    let approved = group.approve("vm", &machine(64)).unwrap();
    group.flush();
    let approved = approved.open(&group.durable()).unwrap_err();
    let refused = group.approve("vm", &machine(65)).unwrap_err().to_string();
    assert!(refused.contains("make room"), "{refused}");
    disk.set_faults(Faults::default());
    group.retry();
    group.flush();
    approved.open(&group.durable()).unwrap();
    assert!(group.machine("vm").is_approved());
    assert_eq!(kept(&disk), (Some(64), Some(64)));
    let large = (0..64).map(|n| tidelock_protocol::machine::MachineDisk {
        name: format!("{n:x<64}"),
        bus: tidelock_protocol::machine::Bus::Virtio,
        serial: None,
    });
    let large = tidelock_protocol::machine::Machine { disks: large.collect(), ..machine(1) };
    group.attach(at_ms(0), LINK, "host-a", &Attach { machine: Some(large), ..described(1, 1) });
    assert!(attached(&group.take_outputs()).is_some());
    assert!(!group.machine("vm").is_approved(), "another one is not");
}
