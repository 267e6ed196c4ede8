//! NBD: whatever a client sends, in whatever pieces, the session keeps its promises to its
//! caller (`tests/common/drive.rs` of `tidelock-nbd`), and pieces make no difference.
//!
//! Input: mode (even: a program, odd: the stream itself), two bytes for the pieces, the rest.
#![no_main]

#[path = "../../protocol/nbd/tests/session/common/drive.rs"]
mod drive;

use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use tidelock_nbd::ExportTable;

static EXPORTS: LazyLock<ExportTable> = LazyLock::new(tidelock_fuzz::nbd::exports);

fuzz_target!(|data: &[u8]| {
    let [mode, first, second, rest @ ..] = data else { return };
    let stream = match mode % 2 {
        0 => &tidelock_fuzz::nbd::conversation(rest)[..],
        _ => rest,
    };
    let whole = drive::drive(&EXPORTS, stream, &[]);
    let pieces = tidelock_fuzz::pieces(*first, *second);
    assert_eq!(whole, drive::drive(&EXPORTS, stream, &pieces));
});
