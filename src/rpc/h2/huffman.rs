//! Decodes the Huffman code of HPACK (RFC 7541 §5.2 and Appendix B). We send no string in it: the
//! few bytes that it saves in the headers of a call are not worth an encoder.
//!
//! The code is canonical: codes of the same length are consecutive numbers in the order of their
//! symbols, and shorter codes come first. So the table of lengths defines the code; the rest is
//! computed at compile time.

/// Lengths in bits of the codes of symbols 0 to 255 and of EOS (256), from the last column of
/// appendix B.
#[rustfmt::skip]
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

const SHORTEST: usize = 5;
const LONGEST: usize = 30;
const EOS: u16 = 256;

struct Code {
    /// The symbols in the order of their codes.
    symbols: [u16; 257],
    /// For each length, the first code that is longer, left-aligned in 32 bits; 2^32 after the
    /// longest.
    limits: [u64; LONGEST + 1],
    /// For each length, the difference between a code and its index in `symbols`, modulo 2^32.
    offsets: [u32; LONGEST + 1],
    /// For each value of the next 8 bits, the symbol and the length of the code that they begin
    /// with; length 0 if the code is longer than 8 bits.
    short: [(u8, u8); 256],
}

const fn build() -> Code {
    let mut code = Code {
        symbols: [0; 257],
        limits: [0; LONGEST + 1],
        offsets: [0; LONGEST + 1],
        short: [(0, 0); 256],
    };
    let (mut next, mut index, mut length) = (0u32, 0usize, 1);
    while length <= LONGEST {
        next <<= 1;
        code.offsets[length] = (index as u32).wrapping_sub(next);
        let mut symbol = 0;
        while symbol < LENGTHS.len() {
            if LENGTHS[symbol] as usize == length {
                code.symbols[index] = symbol as u16;
                if length <= 8 {
                    let mut entry = (next as usize) << (8 - length);
                    while entry < (next as usize + 1) << (8 - length) {
                        code.short[entry] = (symbol as u8, length as u8);
                        entry += 1;
                    }
                }
                next += 1;
                index += 1;
            }
            symbol += 1;
        }
        code.limits[length] = (next as u64) << (32 - length);
        length += 1;
    }
    code
}

static CODE: Code = build();

/// Appends the decoded text. Returns `None` if no encoder may produce `code` (§5.2): it has an EOS, a
/// padding longer than 7 bits, or a padding that is not all ones.
pub(super) fn decode(code: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let mut input = code.iter();
    // The unread bits are left-aligned with ones behind them, so a legal padding looks like the
    // start of EOS.
    let (mut bits, mut count) = (u64::MAX, 0);
    loop {
        while count <= 56
            && let Some(&byte) = input.next()
        {
            bits &= !(0xff << (56 - count)) | u64::from(byte) << (56 - count);
            count += 8;
        }
        let (short, short_length) = CODE.short[(bits >> 56) as usize];
        let (symbol, length) = if short_length > 0 {
            (u16::from(short), usize::from(short_length))
        } else {
            let window = bits >> 32;
            let length = (SHORTEST..=LONGEST).find(|&length| window < CODE.limits[length])?;
            let index = ((window >> (32 - length)) as u32).wrapping_add(CODE.offsets[length]);
            (CODE.symbols[index as usize], length)
        };
        if length > count {
            return (count < 8 && bits == u64::MAX).then_some(());
        }
        if symbol == EOS {
            return None;
        }
        out.push(symbol as u8);
        bits = bits << length | ((1 << length) - 1);
        count -= length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the code of a symbol, right-aligned, and its length.
    fn code(symbol: u16) -> (u32, usize) {
        let index = CODE.symbols.iter().position(|&it| it == symbol).unwrap();
        let length = usize::from(LENGTHS[usize::from(symbol)]);
        ((index as u32).wrapping_sub(CODE.offsets[length]), length)
    }

    fn encoded(text: &[u8]) -> Vec<u8> {
        let mut bits = String::new();
        for &byte in text {
            let (code, length) = code(byte.into());
            bits += &format!("{code:0length$b}");
        }
        bits += &"1".repeat(bits.len().next_multiple_of(8) - bits.len());
        let bytes = bits.as_bytes().chunks(8);
        bytes
            .map(|byte| u8::from_str_radix(str::from_utf8(byte).unwrap(), 2).unwrap())
            .collect()
    }

    fn decoded(code: &[u8]) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        decode(code, &mut out).map(|()| out)
    }

    #[test]
    fn the_code_is_complete_and_ends_with_eos() {
        // Kraft's equality, and the first and last code of appendix B.
        assert_eq!(
            LENGTHS
                .iter()
                .map(|&length| 1u64 << (LONGEST - usize::from(length)))
                .sum::<u64>(),
            1 << LONGEST
        );
        assert_eq!(code(b'0'.into()), (0, 5));
        assert_eq!(code(EOS), (0x3fff_ffff, 30));
        assert_eq!(code(22), (0x3fff_fffe, 30));
        assert_eq!(code(b'\\'.into()), (0x7fff0, 19));
        // one code of each other length above 8
        for (symbol, expected) in [
            (u16::from(b'!'), (0x3f8, 10)),
            (b'|'.into(), (0x7fc, 11)),
            (b'#'.into(), (0xffa, 12)),
            (0, (0x1ff8, 13)),
            (b'^'.into(), (0x3ffc, 14)),
            (b'<'.into(), (0x7ffc, 15)),
            (128, (0xf_ffe6, 20)),
            (153, (0x1f_ffdc, 21)),
            (129, (0x3f_ffd2, 22)),
            (1, (0x7f_ffd8, 23)),
            (9, (0xff_ffea, 24)),
            (199, (0x1ff_ffec, 25)),
            (192, (0x3ff_ffe0, 26)),
            (203, (0x7ff_ffde, 27)),
            (2, (0xfff_ffe2, 28)),
        ] {
            assert_eq!(code(symbol), expected, "{symbol}");
        }
    }

    #[test]
    fn the_examples_of_appendix_c_hold() {
        let code = [
            0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff,
        ];
        assert_eq!(encoded(b"www.example.com"), code);
        assert_eq!(decoded(&code).unwrap(), b"www.example.com");
        assert_eq!(encoded(b"no-cache"), [0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf]);
    }

    #[test]
    fn every_byte_survives() {
        let all: Vec<u8> = (0..=255).chain((0..=255).rev()).collect();
        assert_eq!(decoded(&encoded(&all)).unwrap(), all);
        for byte in 0..=255 {
            assert_eq!(decoded(&encoded(&[byte])).unwrap(), [byte]);
        }
        assert_eq!(decoded(b"").unwrap(), b"");
    }

    #[test]
    fn wrong_padding_is_refused() {
        assert_eq!(decoded(&[0b0000_0111]).unwrap(), b"0");
        assert_eq!(decoded(&[0b0000_0110]), None, "padding not of ones");
        assert_eq!(decoded(&[0b0000_0111, 0xff]), None, "more than 7 bits");
        assert_eq!(decoded(&[0xff, 0xff, 0xff, 0xff]), None, "EOS");
        assert_eq!(decoded(&[0xff, 0xff]), None, "the start of a long code");
    }
}
