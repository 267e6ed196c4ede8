//! Positions in the log.

use std::fmt;
use std::str::FromStr;

/// A position in a log: the number of bytes before it. Written as PostgreSQL does: the upper and the lower 32 bits in
/// hexadecimal, with a slash between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

/// A text that is no position in a log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no position in a log: two hexadecimal numbers of up to 8 digits, as in 16/B374D848"
)]
pub struct LsnError {
    /// The text, cut off after 40 characters.
    pub text: String,
}

impl Lsn {
    /// The first multiple of 8 that is not before this position: where the next record begins at the earliest.
    pub(crate) fn aligned(self) -> Lsn {
        Lsn(self.0.next_multiple_of(8))
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xffff_ffff)
    }
}

impl FromStr for Lsn {
    type Err = LsnError;

    fn from_str(text: &str) -> Result<Lsn, LsnError> {
        let halves =
            text.split_once('/').and_then(|(upper, lower)| Some((half(upper)?, half(lower)?)));
        let (upper, lower) =
            halves.ok_or_else(|| LsnError { text: text.chars().take(40).collect() })?;
        Ok(Lsn(u64::from(upper) << 32 | u64::from(lower)))
    }
}

/// Reads up to 8 digits, without the sign that the standard library allows.
fn half(digits: &str) -> Option<u32> {
    let is_number =
        (1..=8).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_number { u32::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_have_the_text_form_of_postgresql() {
        for (number, text) in [
            (0, "0/0"),
            (0x16_b374_d848, "16/B374D848"),
            (u64::MAX, "FFFFFFFF/FFFFFFFF"),
            (1 << 32, "1/0"),
        ] {
            assert_eq!(Lsn(number).to_string(), text);
            assert_eq!(text.parse(), Ok(Lsn(number)));
        }
        assert_eq!("00000016/b374d848".parse(), Ok(Lsn(0x16_b374_d848)));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "/",
            "1/",
            "/1",
            "0",
            "1/2/3",
            "+1/2",
            "1/-2",
            " 1/2",
            "000000001/0",
            "0/g",
            "0/0\n",
        ] {
            assert_eq!(text.parse::<Lsn>(), Err(LsnError { text: text.into() }), "{text:?}");
        }
        let long = "9".repeat(1000);
        assert_eq!(long.parse::<Lsn>().unwrap_err().text.len(), 40);
    }
}
