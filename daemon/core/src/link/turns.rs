//! Whose turn it is to send.
//!
//! Members that have more to send than the connection takes get turns of about the same size, whatever stands between
//! them in the configuration: none waits for another's backlog. Control messages wait for no turn.

use super::member::{Member, MemberError};
use bytes::BytesMut;

/// What goes out in one turn, and a record more at most.
pub const TURN_BYTES: usize = 256 << 10;

/// The turns of the members of one connection.
#[derive(Debug, Default)]
pub struct Turns {
    first: usize,
}

impl Turns {
    /// Takes what members have to send, until `out` is as long as a turn or nothing is left.
    pub fn fill<T>(
        &mut self,
        members: &mut [Member<T>],
        out: &mut BytesMut,
    ) -> Result<(), MemberError> {
        let (first, count) = (self.first, members.len());
        for nth in (first..count).chain(0..first) {
            let before = out.len();
            members[nth].fill(out, TURN_BYTES)?;
            if before < TURN_BYTES && out.len() >= TURN_BYTES {
                // Who got the smaller half of a turn has it still to come.
                let had_its_turn = before <= TURN_BYTES / 2;
                self.first = (nth + usize::from(had_its_turn)) % count;
            }
        }
        Ok(())
    }
}
