//! Random lives of a group, with a crash at any operation of its disk.

use super::*;

/// One step of a random life.
#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, len: u64 },
    Zero { offset: u64, len: u64 },
    Flush,
    Fold,
    Resync,
    CopyDone,
}

fn step() -> impl Strategy<Value = Step> {
    let extent = (0u64..SIZE - 1).prop_flat_map(|o| (Just(o), 1..(SIZE - o).min(1500)));
    prop_oneof![
        6 => extent.clone().prop_map(|(offset, len)| Step::Write { offset, len }),
        1 => extent.prop_map(|(offset, len)| Step::Zero { offset, len }),
        3 => Just(Step::Flush),
        3 => Just(Step::Fold),
        1 => Just(Step::Resync),
        1 => Just(Step::CopyDone),
    ]
}

/// What the test knows of the group's life.
#[derive(Default)]
struct Life {
    /// The disk after each seq.
    disks: Vec<Vec<u8>>,
    /// The greatest entry of C that was acknowledged.
    committed: u64,
    durable: u64,
}

impl Life {
    fn listen(&mut self, group: &mut Group<Memory>) {
        if let Some((durable, committed)) = acked(&group.take_outputs()) {
            self.durable = self.durable.max(durable);
            self.committed = self.committed.max(committed);
        }
    }

    fn run(&mut self, disk: &Memory, steps: &[Step]) -> Option<()> {
        self.disks.push(vec![0; SIZE as usize]);
        let mut group = create(disk).ok()?;
        let mut incarnation = 1;
        group.attach(at_ms(0), LINK, "host-a", &attach_message(1, 0, LastRun::Unknown));
        attached(&group.take_outputs())?;
        for step in steps {
            let seq = self.disks.len() as u64;
            let mut content = self.disks.last().unwrap().clone();
            let byte = (seq % 255) as u8 + 1;
            let record = match step {
                Step::Write { offset, len } => {
                    content[*offset as usize..(offset + len) as usize].fill(byte);
                    write(seq, *offset, byte, *len as usize)
                }
                Step::Zero { offset, len } => {
                    content[*offset as usize..(offset + len) as usize].fill(0);
                    let effect = Effect::Zero { len_bytes: *len as u32, no_hole: false };
                    Record {
                        body: DiskChange { effect, ..write(seq, *offset, 0, 1).body },
                        ..write(seq, *offset, 0, 1)
                    }
                }
                Step::CopyDone => copy_done(seq),
                Step::Flush => {
                    group.flush();
                    self.listen(&mut group);
                    continue;
                }
                Step::Fold => {
                    fold(&mut group);
                    continue;
                }
                Step::Resync => {
                    incarnation += 1;
                    let attach = attach_message(incarnation, 1, LastRun::Unknown);
                    group.attach(at_ms(0), LINK, "host-a", &attach);
                    attached(&group.take_outputs())?;
                    continue;
                }
            };
            self.disks.push(content);
            send(&mut group, LINK, record);
            if group.broken().is_some() {
                return None;
            }
        }
        group.flush();
        self.listen(&mut group);
        Some(())
    }

    /// Rules 1, 2 and 9: what was acknowledged is found, and the recovered disk is one that the
    /// primary had, at or after what was committed.
    fn check(&self, disk: &Memory) {
        let opened = Group::open(disk.clone(), at_ms(0), options()).expect("opens");
        let Some((mut group, _)) = opened else {
            assert_eq!(self.durable, 0);
            return;
        };
        let state = group.state().writers[0];
        if group.manifest().member(WRITER).is_none() {
            // The power went off before the first attachment was answered.
            assert_eq!((self.durable, state.seq.0), (0, 0));
            return;
        }
        assert!(state.seq.0 >= self.durable && state.committed.0 >= self.committed);
        assert_eq!(read_disk(&mut group), self.disks[state.seq.0 as usize], "all that arrived");
        drop(group);
        let mut group = reopen(disk);
        match group.recover(at_ms(0), true) {
            Ok(recovery) => {
                let cut = recovery.writers[0].recovered.0;
                assert!(cut >= self.committed);
                assert_eq!(read_disk(&mut group), self.disks[cut as usize], "cut {cut}");
                while fold(&mut group) {}
                assert_eq!(read_disk(&mut group), self.disks[cut as usize], "folded");
            }
            Err(RecoverError::Initialising { .. }) => {
                assert!(matches!(state.copy, CopyState::Empty | CopyState::Partial));
            }
            Err(e) => panic!("{e}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn whatever_happens_the_recovered_disk_is_one_that_was(
        steps in prop::collection::vec(step(), 1..60),
        at in 0u64..200,
        seed: u64,
    ) {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let mut life = Life::default();
        life.run(&disk, &steps);
        let mut state = seed | 1;
        for threshold in [0, u64::MAX / 8, u64::MAX / 2, u64::MAX / 8 * 7, u64::MAX] {
            life.check(&disk.crash(&mut || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state < threshold
            }));
        }
    }
}
