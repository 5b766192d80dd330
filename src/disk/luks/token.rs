//! The tokens of Firstlight in the metadata, in addition to token 0. Each is found by its `type`.
//! Constellation and cryptsetup preserve tokens of unknown types.

use serde_json::Value;

use super::error::{Error, HeaderFault};

/// LUKS2_TOKENS_MAX of libcryptsetup.
pub const MAX_TOKENS: u32 = 32;

/// Finds the token of this type, and its number. The error says what is wrong.
pub fn find<'a>(
    tokens: &'a Value,
    kind: &str,
) -> Result<Option<(&'a str, &'a Value)>, HeaderFault> {
    let mut ours = tokens
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, token)| token["type"] == kind);
    let found = ours.next().map(|(id, token)| (id.as_str(), token));
    match ours.next() {
        Some(_) => Err(format!("more than one token of type {kind:?}").into()),
        None => Ok(found),
    }
}

/// Removes all tokens of this type but token 0.
pub fn remove(metadata: &mut Value, kind: &str) {
    if let Some(tokens) = metadata["tokens"].as_object_mut() {
        tokens.retain(|id, token| id == "0" || token["type"] != kind);
    }
}

/// Writes a token: replaces those of its type, or uses the first free number from `first` on. Token
/// 0 is that of Constellation.
pub fn set(metadata: &mut Value, first: u32, token: Value) -> Result<(), Error> {
    let tokens = &metadata["tokens"];
    let is_ours = |id: &u32| tokens[id.to_string()]["type"] == token["type"];
    let is_free = |id: &u32| tokens.get(id.to_string()).is_none();
    let id = (1..MAX_TOKENS).find(is_ours);
    let id = id.or_else(|| (first..MAX_TOKENS).find(is_free));
    let id = id.ok_or(Error::NoRoom("another token"))?;
    remove(metadata, token["type"].as_str().unwrap_or_default());
    metadata["tokens"][id.to_string()] = token;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn two_tokens_of_a_type_are_replaced_by_one_and_others_stay() {
        let mut metadata = json!({"tokens": {"0": {"type": "x"}, "1": {"type": "other"}, "3": {"type": "x"}, "5": {"type": "x"}}});
        set(&mut metadata, 2, json!({"type": "x", "new": true})).unwrap();
        let expected =
            json!({"0": {"type": "x"}, "1": {"type": "other"}, "3": {"type": "x", "new": true}});
        assert_eq!(metadata["tokens"], expected);
    }
}
