//! HPACK (RFC 7541): encodes and decodes header fields, with a dynamic table for each direction.

use std::collections::VecDeque;

use super::headers::{HeaderList, SCRATCH};
use super::huffman;

/// Size of the dynamic table in bytes: the initial value of both sides (RFC 9113 §6.5.2). Our
/// encoder never uses a larger one.
pub(super) const TABLE_SIZE: usize = 4096;
/// Bytes that each entry counts in addition to its name and value (§4.1).
const ENTRY_OVERHEAD: usize = 32;

/// The static table of appendix A. An index on the wire is one higher than the index here.
#[rustfmt::skip]
const STATIC_TABLE: [(&str, &str); 61] = [
    (":authority", ""), (":method", "GET"), (":method", "POST"), (":path", "/"), (":path", "/index.html"),
    (":scheme", "http"), (":scheme", "https"), (":status", "200"), (":status", "204"), (":status", "206"),
    (":status", "304"), (":status", "400"), (":status", "404"), (":status", "500"), ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"), ("accept-language", ""), ("accept-ranges", ""), ("accept", ""),
    ("access-control-allow-origin", ""), ("age", ""), ("allow", ""), ("authorization", ""), ("cache-control", ""),
    ("content-disposition", ""), ("content-encoding", ""), ("content-language", ""), ("content-length", ""),
    ("content-location", ""), ("content-range", ""), ("content-type", ""), ("cookie", ""), ("date", ""), ("etag", ""),
    ("expect", ""), ("expires", ""), ("from", ""), ("host", ""), ("if-match", ""), ("if-modified-since", ""),
    ("if-none-match", ""), ("if-range", ""), ("if-unmodified-since", ""), ("last-modified", ""), ("link", ""),
    ("location", ""), ("max-forwards", ""), ("proxy-authenticate", ""), ("proxy-authorization", ""), ("range", ""),
    ("referer", ""), ("refresh", ""), ("retry-after", ""), ("server", ""), ("set-cookie", ""),
    ("strict-transport-security", ""), ("transfer-encoding", ""), ("user-agent", ""), ("vary", ""), ("via", ""),
    ("www-authenticate", ""),
];

/// A header block that breaks RFC 7541; it is a connection error of type COMPRESSION_ERROR.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CompressionError(pub(super) &'static str);

/// The dynamic table (§2.3.2): first in, first out, with the newest entry at the front.
struct DynamicTable {
    /// Name and value in a row, and the position where the value starts.
    entries: VecDeque<(Vec<u8>, usize)>,
    size: usize,
    max_size: usize,
}

impl DynamicTable {
    fn new() -> DynamicTable {
        DynamicTable {
            entries: VecDeque::new(),
            size: 0,
            max_size: TABLE_SIZE,
        }
    }

    fn get(&self, index: usize) -> Option<(&[u8], &[u8])> {
        self.entries
            .get(index)
            .map(|(bytes, name)| bytes.split_at(*name))
    }

    /// Adds an entry. An entry that is larger than the table empties it (§4.4).
    fn insert(&mut self, name: &[u8], value: &[u8]) {
        let size = name.len() + value.len() + ENTRY_OVERHEAD;
        self.evict(size);
        if size <= self.max_size {
            self.size += size;
            self.entries
                .push_front(([name, value].concat(), name.len()));
        }
    }

    fn resize(&mut self, max_size: usize) {
        self.max_size = max_size;
        self.evict(0);
    }

    /// Removes the oldest entries until `room` bytes fit or the table is empty (§4.3).
    fn evict(&mut self, room: usize) {
        while self.size + room > self.max_size {
            let Some((bytes, _)) = self.entries.pop_back() else {
                return;
            };
            self.size -= bytes.len() + ENTRY_OVERHEAD;
        }
    }
}

/// Decodes header blocks. After an error the connection must end, because our table differs from
/// the peer's.
pub(super) struct Decoder {
    table: DynamicTable,
    /// Buffer for the name of a literal, which goes into the list and into the table.
    name: Vec<u8>,
    value: Vec<u8>,
}

impl Decoder {
    pub(super) fn new() -> Decoder {
        Decoder {
            table: DynamicTable::new(),
            name: Vec::new(),
            value: Vec::new(),
        }
    }

    /// Decodes a whole header block into `list`. Fields beyond the list's limit are decoded for the
    /// sake of the dynamic table, but not stored.
    pub(super) fn decode(
        &mut self,
        block: &[u8],
        list: &mut HeaderList,
    ) -> Result<(), CompressionError> {
        let mut input = Input(block);
        let mut started = false;
        while let Some(&first) = input.0.first() {
            match first {
                0x80.. => {
                    let (name, value) = self.field(input.integer(7)?)?;
                    list.push(name, value);
                }
                0x40..0x80 => {
                    self.literal(&mut input, 6)?;
                    list.push(&self.name, &self.value);
                    self.table.insert(&self.name, &self.value);
                }
                // Literals without indexing (0x00) and never-indexed literals (0x10) are the same
                // for us, because we forward nothing.
                0x00..0x20 => {
                    self.literal(&mut input, 4)?;
                    list.push(&self.name, &self.value);
                }
                0x20..0x40 => {
                    let size = input.integer(5)?;
                    if started {
                        return Err(CompressionError(
                            "a table size update after a field (RFC 7541 §4.2)",
                        ));
                    }
                    if size > TABLE_SIZE {
                        return Err(CompressionError(
                            "a table size update above the limit (RFC 7541 §6.3)",
                        ));
                    }
                    self.table.resize(size);
                    continue;
                }
            }
            started = true;
        }
        for buffer in [&mut self.name, &mut self.value] {
            buffer.clear();
            buffer.shrink_to(SCRATCH);
        }
        Ok(())
    }

    /// Returns the field at `index`: the static table comes first, then the dynamic table (§2.3.3).
    fn field(&self, index: usize) -> Result<(&[u8], &[u8]), CompressionError> {
        let field = match index {
            0 => None,
            1..=61 => Some(STATIC_TABLE[index - 1])
                .map(|(name, value)| (name.as_bytes(), value.as_bytes())),
            62.. => self.table.get(index - 62),
        };
        field.ok_or(CompressionError(
            "an index outside of both tables (RFC 7541 §2.3.3)",
        ))
    }

    /// Reads a literal field (§6.2): its name by index or in full, then its value.
    fn literal(&mut self, input: &mut Input<'_>, prefix: u8) -> Result<(), CompressionError> {
        let index = input.integer(prefix)?;
        let mut name = std::mem::take(&mut self.name);
        name.clear();
        match index {
            0 => input.string(&mut name)?,
            _ => name.extend_from_slice(self.field(index)?.0),
        }
        self.name = name;
        self.value.clear();
        input.string(&mut self.value)
    }
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Result<u8, CompressionError> {
        let (&first, rest) = self
            .0
            .split_first()
            .ok_or(CompressionError("a header block that ends within a field"))?;
        self.0 = rest;
        Ok(first)
    }

    /// Reads an integer (§5.1) of at most five bytes and below 2^28. Every length or index that we
    /// could accept is smaller.
    fn integer(&mut self, prefix: u8) -> Result<usize, CompressionError> {
        let mask = (1usize << prefix) - 1;
        let mut value = usize::from(self.byte()?) & mask;
        if value < mask {
            return Ok(value);
        }
        for shift in [0, 7, 14, 21] {
            let byte = self.byte()?;
            value += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(CompressionError(
            "an integer that is too large (RFC 7541 §5.1)",
        ))
    }

    /// Reads a string literal (§5.2).
    fn string(&mut self, out: &mut Vec<u8>) -> Result<(), CompressionError> {
        let huffman = self.0.first().is_some_and(|first| first & 0x80 != 0);
        let length = self.integer(7)?;
        let (text, rest) = self.0.split_at_checked(length).ok_or(CompressionError(
            "a string that is longer than its header block",
        ))?;
        self.0 = rest;
        if huffman {
            huffman::decode(text, out)
                .ok_or(CompressionError("a broken Huffman code (RFC 7541 §5.2)"))?;
        } else {
            out.extend_from_slice(text);
        }
        Ok(())
    }
}

/// How the compression treats a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indexing {
    /// Enters the dynamic table: for values that repeat on most calls.
    Yes,
    /// Stays out of the dynamic table: for values that differ on each call.
    No,
    /// A secret: no intermediary may add it to a table either (RFC 7541 §7.1.3).
    Never,
}

/// A header field to send: name, value and its compression.
pub type Field<'a> = (&'a [u8], &'a [u8], Indexing);

/// Encodes header blocks.
pub(super) struct Encoder {
    table: DynamicTable,
    /// The smallest size of the table since the last block; the next block must announce it (§4.2).
    smallest: Option<usize>,
}

impl Encoder {
    pub(super) fn new() -> Encoder {
        Encoder {
            table: DynamicTable::new(),
            smallest: None,
        }
    }

    /// Applies the peer's SETTINGS_HEADER_TABLE_SIZE.
    pub(super) fn resize(&mut self, peer_limit: u32) {
        let size = TABLE_SIZE.min(peer_limit as usize);
        if size != self.table.max_size {
            self.smallest = Some(self.smallest.unwrap_or(usize::MAX).min(size));
            self.table.resize(size);
        }
    }

    /// Starts a header block.
    pub(super) fn begin(&mut self, out: &mut Vec<u8>) {
        if let Some(smallest) = self.smallest.take() {
            if smallest < self.table.max_size {
                integer(smallest, 5, 0x20, out);
            }
            integer(self.table.max_size, 5, 0x20, out);
        }
    }

    /// Appends one field to the block.
    pub(super) fn field(
        &mut self,
        name: &[u8],
        value: &[u8],
        indexing: Indexing,
        out: &mut Vec<u8>,
    ) {
        let (name_index, whole) = self.find(name, value);
        if whole && indexing != Indexing::Never {
            return integer(name_index, 7, 0x80, out);
        }
        let (prefix, pattern) = match indexing {
            Indexing::Yes => (6, 0x40),
            Indexing::No => (4, 0x00),
            Indexing::Never => (4, 0x10),
        };
        integer(name_index, prefix, pattern, out);
        if name_index == 0 {
            string(name, out);
        }
        string(value, out);
        if indexing == Indexing::Yes {
            self.table.insert(name, value);
        }
    }

    /// Returns the index of the whole field and `true`; otherwise the index of its name, or 0 if it
    /// has none, and `false`.
    fn find(&self, name: &[u8], value: &[u8]) -> (usize, bool) {
        let mut name_index = 0;
        for (index, (bytes, name_length)) in self.table.entries.iter().enumerate() {
            let (entry_name, entry_value) = bytes.split_at(*name_length);
            if entry_name == name {
                if entry_value == value {
                    return (index + 62, true);
                }
                name_index = index + 62;
            }
        }
        for (index, (entry_name, entry_value)) in STATIC_TABLE.iter().enumerate() {
            if entry_name.as_bytes() == name {
                if entry_value.as_bytes() == value {
                    return (index + 1, true);
                }
                name_index = index + 1;
            }
        }
        (name_index, false)
    }
}

/// Appends an integer (§5.1). The first byte also has the bits of `pattern`.
fn integer(value: usize, prefix: u8, pattern: u8, out: &mut Vec<u8>) {
    let mask = (1usize << prefix) - 1;
    if value < mask {
        return out.push(pattern | value as u8);
    }
    out.push(pattern | mask as u8);
    let mut rest = value - mask;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

/// Appends a string literal (§5.2), never in the Huffman code.
fn string(text: &[u8], out: &mut Vec<u8>) {
    integer(text.len(), 7, 0, out);
    out.extend_from_slice(text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    fn unhex(text: &str) -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    }

    fn decode(
        decoder: &mut Decoder,
        block: &[u8],
    ) -> Result<Vec<(String, String)>, CompressionError> {
        let mut list = HeaderList::new(1 << 20);
        decoder.decode(block, &mut list)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(list
            .iter()
            .map(|(name, value)| (text(name), text(value)))
            .collect())
    }

    fn fields(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect()
    }

    const FIRST: [(&str, &str); 4] = [
        (":method", "GET"),
        (":scheme", "http"),
        (":path", "/"),
        (":authority", "www.example.com"),
    ];

    #[test]
    fn the_requests_of_appendix_c_decode_and_encode() {
        let third = [
            (":method", "GET"),
            (":scheme", "https"),
            (":path", "/index.html"),
            (":authority", "www.example.com"),
            ("custom-key", "custom-value"),
        ];
        let second = [FIRST.as_slice(), &[("cache-control", "no-cache")]].concat();
        let (mut decoder, mut encoder) = (Decoder::new(), Encoder::new());
        // as in C.4 with the Huffman code, and as in C.3 without it
        for (coded, plain, expected) in [
            (
                "828684418cf1e3c2e5f23a6ba0ab90f4ff",
                "828684410f7777772e6578616d706c652e636f6d",
                FIRST.as_slice(),
            ),
            (
                "828684be5886a8eb10649cbf",
                "828684be58086e6f2d6361636865",
                &second,
            ),
            (
                "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
                "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
                &third,
            ),
        ] {
            assert_eq!(
                decode(&mut decoder, &unhex(coded)).unwrap(),
                fields(expected)
            );
            let mut out = Vec::new();
            encoder.begin(&mut out);
            for (name, value) in expected {
                encoder.field(name.as_bytes(), value.as_bytes(), Indexing::Yes, &mut out);
            }
            assert_eq!(out, unhex(plain));
        }
        assert_eq!(decoder.table.size, 164);
        assert_eq!(encoder.table.size, 164);
    }

    #[test]
    fn the_responses_of_appendix_c6_evict_the_same_entries() {
        let mut decoder = Decoder::new();
        decoder.table.resize(256);
        for (block, size) in [
            (
                "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
                222,
            ),
            ("4883640effc1c0bf", 222),
            (
                "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
                215,
            ),
        ] {
            decode(&mut decoder, &unhex(block)).unwrap();
            assert_eq!(decoder.table.size, size);
        }
        assert_eq!(decoder.table.get(0).unwrap().0, b"set-cookie");
    }

    #[test]
    fn a_smaller_table_is_announced_and_followed() {
        let (mut decoder, mut encoder) = (Decoder::new(), Encoder::new());
        let mut send = |encoder: &mut Encoder, value: &str| {
            let mut out = Vec::new();
            encoder.begin(&mut out);
            encoder.field(b"x", value.as_bytes(), Indexing::Yes, &mut out);
            assert_eq!(decode(&mut decoder, &out).unwrap(), fields(&[("x", value)]));
            (out[0], decoder.table.size)
        };
        assert_eq!(send(&mut encoder, "1").1, 34);
        encoder.resize(0);
        encoder.resize(100);
        assert_eq!(
            send(&mut encoder, "2"),
            (0x20, 34),
            "the smallest size first"
        );
        encoder.resize(1 << 31);
        assert_eq!(encoder.table.max_size, TABLE_SIZE);
        assert_eq!(send(&mut encoder, "3"), (0x3f, 68));
        encoder.resize(20);
        assert_eq!(send(&mut encoder, "4"), (0x34, 0), "no entry fits");
    }

    #[test]
    fn secrets_stay_out_of_the_tables() {
        let mut encoder = Encoder::new();
        let mut out = Vec::new();
        encoder.field(b"authorization", b"secret", Indexing::Never, &mut out);
        assert_eq!(out[0], 0x1f);
        assert_eq!(encoder.table.size, 0);
    }

    /// Each rule that a header block can break, with its section. Each violation is a connection
    /// error (RFC 9113 §4.3).
    #[test]
    fn rfc7541_broken_blocks_are_compression_errors() {
        for (section, block, why) in [
            ("2.3.3", "be", "an index beyond the tables"),
            ("2.3.3", "7e0179", "the name of an entry beyond the tables"),
            ("2.3.3", "400161017abf", "one above the newest entry"),
            ("4.2", "8220", "a table size update after a field"),
            ("5.1", "ffffffffff7f", "an integer above 2^32"),
            ("5.1", "ff808080808001", "an integer of too many bytes"),
            ("5.1", "ff", "an integer without end"),
            ("5.2", "400a61", "a name longer than the block"),
            ("5.2", "4001610a62", "a value longer than the block"),
            ("5.2", "408106", "a padding not of ones"),
            ("5.2", "40820fff", "a padding longer than 7 bits"),
            ("5.2", "4084ffffffff", "the code of EOS"),
            ("6.1", "80", "index 0"),
            ("6.2.1", "40", "a literal to be indexed without a name"),
            ("6.2.1", "400161", "… without a value"),
            ("6.2.2", "00", "a literal without indexing, without a name"),
            ("6.2.2", "000161", "… without a value"),
            (
                "6.2.3",
                "10",
                "a literal never to be indexed, without a name",
            ),
            ("6.2.3", "100161", "… without a value"),
            (
                "6.3",
                "3fe21f",
                "a table size update above SETTINGS_HEADER_TABLE_SIZE",
            ),
        ] {
            assert!(
                decode(&mut Decoder::new(), &unhex(block)).is_err(),
                "§{section}: {why}"
            );
        }
        // These blocks are just within the rules: the largest table, two updates at the start, the
        // newest entry, a padding of 7 bits.
        for block in ["3fe11f82", "203fe11f82", "400161017abe", "40810f0179"] {
            assert!(
                decode(&mut Decoder::new(), &unhex(block)).is_ok(),
                "{block}"
            );
        }
    }

    #[test]
    fn a_list_above_the_limit_is_dropped_but_updates_the_table() {
        let mut decoder = Decoder::new();
        let mut list = HeaderList::new(100);
        // One entry of 34 bytes, then 16 000 references to it.
        decoder
            .decode(
                &[vec![0x40, 1, b'a', 1, b'b'], vec![0xbe; 16_000]].concat(),
                &mut list,
            )
            .unwrap();
        assert!(list.is_too_large());
        assert_eq!(list.iter().count(), 2);
        assert_eq!(decoder.table.size, 34);
    }

    #[test]
    fn mutated_blocks_never_panic_and_never_grow_the_table() {
        let seeds = [
            unhex("828684418cf1e3c2e5f23a6ba0ab90f4ff"),
            unhex("3fe11f828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"),
            unhex(
                "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
            ),
        ];
        let mut decoder = Decoder::new();
        for block in seeds.iter().flat_map(|seed| mutations(seed, 7000)) {
            let mut list = HeaderList::new(500);
            if decoder.decode(&block, &mut list).is_err() {
                decoder = Decoder::new();
            }
            assert!(decoder.table.size <= TABLE_SIZE);
        }
    }
}
