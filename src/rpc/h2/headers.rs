//! Lists of header fields, and the rules for malformed ones (RFC 9113 §8).

/// Bytes that each field counts in addition to its name and value (§6.5.2,
/// SETTINGS_MAX_HEADER_LIST_SIZE).
pub(super) const FIELD_OVERHEAD: usize = 32;

/// Bytes of buffer that a connection keeps after a large header block.
pub(super) const SCRATCH: usize = 1 << 10;

/// The fields of one header block, in order.
pub struct HeaderList {
    /// All names and values in a row.
    bytes: Vec<u8>,
    /// Where each name and each value ends in `bytes`.
    ends: Vec<(usize, usize)>,
    size: usize,
    limit: usize,
}

impl HeaderList {
    /// Creates an empty list that holds fields up to a size of `limit` bytes, counted as in
    /// SETTINGS_MAX_HEADER_LIST_SIZE.
    pub(crate) fn new(limit: usize) -> HeaderList {
        HeaderList {
            bytes: Vec::new(),
            ends: Vec::new(),
            size: 0,
            limit,
        }
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(SCRATCH);
        self.ends.clear();
        self.ends.shrink_to(SCRATCH / FIELD_OVERHEAD);
        self.size = 0;
    }

    /// Appends a field. After a field that exceeds the limit, the list is empty and stays so.
    pub(crate) fn push(&mut self, name: &[u8], value: &[u8]) {
        self.size = self
            .size
            .saturating_add(name.len() + value.len() + FIELD_OVERHEAD);
        if !self.is_too_large() {
            self.bytes.extend_from_slice(name);
            let name_end = self.bytes.len();
            self.bytes.extend_from_slice(value);
            self.ends.push((name_end, self.bytes.len()));
        }
    }

    pub(super) fn is_too_large(&self) -> bool {
        self.size > self.limit
    }

    /// Returns (name, value) in the order of the block.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut start = 0;
        self.ends.iter().map(move |&(name_end, value_end)| {
            let field = (
                &self.bytes[start..name_end],
                &self.bytes[name_end..value_end],
            );
            start = value_end;
            field
        })
    }

    /// Returns the first value of `name`.
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.iter()
            .find(|(field, _)| *field == name)
            .map(|(_, value)| value)
    }

    /// Returns whether the list is a well-formed request (§8.1, §8.2, §8.3.1).
    pub(super) fn is_request(&self) -> bool {
        let Some([method, scheme, path, authority]) =
            self.check(&[b":method", b":scheme", b":path", b":authority"])
        else {
            return false;
        };
        if method == Some(b"CONNECT") {
            return scheme.is_none() && path.is_none() && authority.is_some();
        }
        method.is_some() && scheme.is_some() && path.is_some_and(|path| !path.is_empty())
    }

    /// Returns whether the list is a well-formed response (§8.3.2).
    pub(super) fn is_response(&self) -> bool {
        self.check(&[b":status"]).is_some_and(|[status]| {
            status.is_some_and(|status| status.len() == 3 && status.iter().all(u8::is_ascii_digit))
        })
    }

    /// Returns whether the list is well-formed trailers (§8.1: no pseudo-header fields).
    pub(super) fn are_trailers(&self) -> bool {
        self.check(&[]).is_some()
    }

    /// Returns whether this is an interim response (1xx); the final response follows it.
    pub(super) fn is_interim(&self) -> bool {
        self.get(b":status").is_some_and(|status| status[0] == b'1')
    }

    /// Returns the value of `content-length`: `None` if there is none, `Some(None)` if it is no
    /// number or there are different ones (§8.1.1).
    pub(super) fn content_length(&self) -> Option<Option<u64>> {
        let mut values = self
            .iter()
            .filter(|(name, _)| *name == b"content-length")
            .map(|(_, value)| value);
        let first = values.next()?;
        let digits = !first.is_empty()
            && first.iter().all(u8::is_ascii_digit)
            && values.all(|other| other == first);
        Some(if digits {
            std::str::from_utf8(first)
                .ok()
                .and_then(|text| text.parse().ok())
        } else {
            None
        })
    }

    /// Returns the values of the allowed pseudo-header fields. `None` means that the list is
    /// malformed: another or repeated pseudo-header field, one behind a regular field (§8.3), an
    /// illegal character (§8.2.1), or a connection-specific field (§8.2.2).
    fn check<const N: usize>(&self, pseudo: &[&[u8]; N]) -> Option<[Option<&[u8]>; N]> {
        let mut found = [None; N];
        let mut regular = false;
        for (name, value) in self.iter() {
            if name.first() == Some(&b':') {
                let index = pseudo.iter().position(|allowed| *allowed == name)?;
                if regular || found[index].is_some() {
                    return None;
                }
                found[index] = Some(value);
            } else {
                regular = true;
                if !is_field_name(name) || is_connection_specific(name, value) {
                    return None;
                }
            }
            if !is_field_value(value) {
                return None;
            }
        }
        Some(found)
    }
}

/// Returns whether `name` is legal (§8.2.1): a token of RFC 9110 §5.6.2 in lower case.
fn is_field_name(name: &[u8]) -> bool {
    let legal = |&byte: &u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.!#$%&'*+^`|~".contains(&byte)
    };
    !name.is_empty() && name.iter().all(legal)
}

/// Returns whether `value` is legal (§8.2.1).
fn is_field_value(value: &[u8]) -> bool {
    let blank = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    !value.iter().any(|byte| matches!(byte, 0 | b'\r' | b'\n'))
        && !blank(value.first())
        && !blank(value.last())
}

/// Returns whether the field is connection-specific, which HTTP/2 forbids (§8.2.2).
fn is_connection_specific(name: &[u8], value: &[u8]) -> bool {
    const FORBIDDEN: [&[u8]; 5] = [
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"transfer-encoding",
        b"upgrade",
    ];
    FORBIDDEN.contains(&name) || name == b"te" && value != b"trailers"
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: [(&str, &str); 3] = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/a.B/C"),
    ];

    fn list(fields: &[(&str, &str)]) -> HeaderList {
        let mut list = HeaderList::new(1 << 16);
        fields
            .iter()
            .for_each(|(name, value)| list.push(name.as_bytes(), value.as_bytes()));
        list
    }

    fn request_with(field: (&str, &str)) -> HeaderList {
        list(&[REQUEST.as_slice(), &[field]].concat())
    }

    #[test]
    fn a_request_needs_method_scheme_and_path() {
        assert!(list(&REQUEST).is_request());
        for missing in 0..3 {
            let mut fields = REQUEST.to_vec();
            fields.remove(missing);
            assert!(!list(&fields).is_request());
        }
        assert!(!list(&[REQUEST[0], REQUEST[1], (":path", "")]).is_request());
        assert!(list(&[(":method", "CONNECT"), (":authority", "a:1")]).is_request());
    }

    #[test]
    fn malformed_requests_are_recognized() {
        assert!(request_with(("te", "trailers")).is_request());
        for field in [
            (":method", "POST"),
            (":status", "200"),
            (":unknown", ""),
            ("Upper", "x"),
            ("", "x"),
            ("a b", "x"),
            ("a:b", "x"),
            ("x", "a\nb"),
            ("x", "a\0"),
            ("x", " a"),
            ("connection", "close"),
            ("keep-alive", "1"),
            ("proxy-connection", "1"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("te", "gzip"),
        ] {
            assert!(!request_with(field).is_request(), "{field:?}");
        }
        assert!(
            !list(&[("x", "1"), REQUEST[0], REQUEST[1], REQUEST[2]]).is_request(),
            "pseudo-header after a field"
        );
    }

    #[test]
    fn responses_have_a_status_and_trailers_no_pseudo_headers() {
        assert!(list(&[(":status", "200")]).is_response());
        assert!(!list(&[(":status", "20")]).is_response());
        assert!(!list(&[]).is_response());
        assert!(list(&[("grpc-status", "0")]).are_trailers());
        assert!(!list(&[(":status", "200")]).are_trailers());
    }

    #[test]
    fn content_length_is_one_number() {
        assert_eq!(list(&REQUEST).content_length(), None);
        assert_eq!(
            request_with(("content-length", "12")).content_length(),
            Some(Some(12))
        );
        assert_eq!(
            list(&[("content-length", "1"), ("content-length", "2")]).content_length(),
            Some(None)
        );
        for broken in ["", "+1", "-1", "99999999999999999999999"] {
            assert_eq!(
                request_with(("content-length", broken)).content_length(),
                Some(None)
            );
        }
    }
}
