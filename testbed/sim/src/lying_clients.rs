//! Clients of the tap that keep to nothing: noise in place of a handshake, requests that are out of range or unknown,
//! more of them than may be under way, answers that nobody reads. Each costs itself: rule 11.

use crate::failure::Checked;
use crate::nbd::{NbdClient, Style};
use crate::schedule::{MS, S};
use crate::world::{Event, World, note};
use bytes::{BufMut, BytesMut};
use tidelock_nbd::wire::{cmd, option};

/// Between two liars at one VM's disks, about.
const LIES_EVERY_NS: u64 = 2 * S;

impl World {
    /// A liar connects to a disk and says all that it has to say, or nothing.
    pub(crate) fn client_lies(&mut self, vm: usize) -> Checked {
        if !self.faulty || self.vms[vm].disks.is_empty() {
            return Ok(());
        }
        let rng = self.vms[vm].clients.rng();
        let (after, stays) = (rng.span(LIES_EVERY_NS), rng.span(200 * MS));
        self.schedule.after(after, Event::ClientLies { vm });
        let size_bytes: Vec<_> = self.vms[vm].disks.iter().map(|disk| disk.size_bytes()).collect();
        let disk = self.vms[vm].clients.rng().index(size_bytes.len());
        let Some(token) = self.next_accept(vm, disk) else { return Ok(()) };
        let words = self.words(vm, disk, size_bytes[disk]);
        let number = self.vms[vm].clients.next_number();
        note!(self, "vm {vm}: a liar connects to disk {disk}: {number}, {} bytes", words.len());
        self.schedule.after(stays, Event::ClientLeaves { vm, number });
        self.connects(vm, disk, token, None)?;
        self.bytes_leave(vm, number, &words)
    }

    fn words(&mut self, vm: usize, disk: usize, size_bytes: u64) -> BytesMut {
        let rng = self.vms[vm].clients.rng();
        let mut words = BytesMut::new();
        let kind = rng.below(4);
        if kind == 0 {
            (0..rng.below(40)).for_each(|_| words.put_u64(rng.number()));
        }
        if kind < 2 {
            return words;
        }
        let mut client = NbdClient::new(format!("d{disk}"), Style::Old);
        client.output.put_u32(3);
        client.put_option(option::EXPORT_NAME, format!("d{disk}").as_bytes());
        for cookie in 0..rng.range(1..40) {
            let len = rng.range(1..4096) as u32;
            match (kind, rng.below(6)) {
                (2, 0) => client.request(0, cmd::READ, cookie, size_bytes, len, &[]),
                (2, 1) => client.request(0, cmd::WRITE, cookie, u64::MAX, 8, &[0xee; 8]),
                (2, 2) => client.request(0, 0xee, cookie, 0, len, &[]),
                (2, 3) => client.request(0xee00, cmd::WRITE_ZEROES, cookie, 0, len, &[]),
                (2, 4) => client.request(0, cmd::FLUSH, cookie, 1, len, &[]),
                (_, 5) => client.request(0, cmd::FLUSH, cookie, 0, 0, &[]),
                _ => client.request(0, cmd::READ, cookie, 0, len.min(size_bytes as u32), &[]),
            }
        }
        client.output
    }
}
