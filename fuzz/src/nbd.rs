//! NBD conversations from short programs.

use tidelock_nbd::{BlockSize, Export, ExportTable, Features};

/// Three exports that differ in every respect.
#[must_use]
pub fn exports() -> ExportTable {
    let all = Features {
        flush: true,
        fua: true,
        trim: true,
        write_zeroes: true,
        fast_zero: true,
        cache: true,
        multi_conn: true,
    };
    let disk = Export {
        name: "disk0".into(),
        description: "first".into(),
        size_bytes: 1 << 20,
        read_only: false,
        block_size: BlockSize::default(),
        features: all,
        users: Some(tidelock_nbd::Users::new(1, "in use".into())),
    };
    let sectors = Export {
        name: "sectors".into(),
        block_size: BlockSize { min: 512, preferred: 4096, max: 32 << 10 },
        features: Features { fast_zero: false, ..all },
        ..disk.clone()
    };
    let read_only = Export {
        name: "ro".into(),
        read_only: true,
        features: Features { fua: false, ..all },
        ..sectors.clone()
    };
    ExportTable::new(vec![disk, sectors, read_only]).expect("good exports")
}

const NAMES: [&str; 4] = ["disk0", "sectors", "ro", ""];
const QUERIES: [&str; 4] = ["base:allocation", "base:", "x-y:z", ""];

/// The bytes of a program, one after the other; zeroes when they are used up.
struct Program<'a>(&'a [u8]);

impl<'a> Program<'a> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((byte, rest)) => {
                self.0 = rest;
                *byte
            }
            None => 0,
        }
    }

    /// A number at which something may change: few bits, anywhere.
    fn edge(&mut self) -> u64 {
        let (bits, shift) = (self.byte(), self.byte());
        let number = u64::from(bits) << (shift % 64);
        if shift & 0x40 != 0 { number.wrapping_sub(1) } else { number }
    }

    fn bytes(&mut self) -> &'a [u8] {
        let len = usize::from(self.byte()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        bytes
    }

    fn name(&mut self) -> Vec<u8> {
        string(NAMES[usize::from(self.byte() % 4)])
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

fn option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend(b"IHAVEOPT");
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// The input stream that a program describes.
#[must_use]
pub fn conversation(program: &[u8]) -> Vec<u8> {
    let mut program = Program(program);
    let mut out = u32::from(program.byte() & 3).to_be_bytes().to_vec();
    let mut cookie = 0_u64;
    while !program.0.is_empty() {
        let op = program.byte();
        match op % 16 {
            command @ 0..8 => {
                let flags = u16::from(program.byte());
                let (offset, len) = (program.edge(), program.edge() as u32);
                // A long payload says no more than a short one.
                let len = if command == 1 { len % 5000 } else { len };
                cookie += 1;
                out.extend(0x2560_9513_u32.to_be_bytes());
                out.extend(flags.to_be_bytes());
                out.extend(u16::from(command).to_be_bytes());
                out.extend(cookie.to_be_bytes());
                out.extend(offset.to_be_bytes());
                out.extend(len.to_be_bytes());
                if command == 1 {
                    out.resize(out.len() + len as usize, 0x55);
                }
            }
            8 => option(&mut out, 8, &[]),
            9 => {
                let mut data = program.name();
                let queries = u32::from(program.byte() % 4);
                data.extend(queries.to_be_bytes());
                for _ in 0..queries {
                    data.extend(string(QUERIES[usize::from(program.byte() % 4)]));
                }
                option(&mut out, 9 + u32::from(op >= 128), &data);
            }
            10 | 11 => {
                let mut data = program.name();
                let asks = program.bytes();
                data.extend((asks.len() as u16).to_be_bytes());
                asks.iter().for_each(|&ask| data.extend([0, ask % 5]));
                option(&mut out, u32::from(op % 16) - 4, &data);
            }
            12 => {
                let name = program.name();
                option(&mut out, 1, &name[4..]);
            }
            13 => option(&mut out, 3, &[]),
            14 => {
                let number = program.byte().into();
                option(&mut out, number, program.bytes());
            }
            _ => out.extend(program.bytes()),
        }
    }
    out
}
