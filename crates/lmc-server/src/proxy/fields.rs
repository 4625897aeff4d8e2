//! The fields of a request's body, in the order and the form in which the client wrote them.

use std::fmt;

use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// Limit on the fields of a request.
pub(super) const MAX_FIELDS: usize = 256;

/// The fields of a request, in their order, each as the client wrote it.
#[derive(Default)]
pub(super) struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'a> Fields<'a> {
    pub(super) fn read(body: &'a [u8]) -> Result<Self, serde_json::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    if fields.len() == MAX_FIELDS {
                        return Err(A::Error::custom("too many fields"));
                    }
                    fields.push(field);
                }
                Ok(fields)
            }
        }
        let mut reader = serde_json::Deserializer::from_slice(body);
        let fields = reader.deserialize_map(Read)?;
        reader.end()?;
        Ok(Self(fields))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.0.iter().map(|(name, value)| (&name[..], *value))
    }

    /// Returns the value of a field. Of several fields with the name the last one counts, as for engines.
    pub(super) fn get(&self, name: &str) -> Option<&'a RawValue> {
        let mut fields = self.0.iter().rev();
        fields.find(|(known, _)| known == name).map(|field| field.1)
    }

    /// Returns true if the client has set a field to a value other than null or false.
    pub(super) fn has(&self, name: &str) -> bool {
        let unset = |value: &RawValue| matches!(value.get(), "null" | "false");
        (self.0.iter()).any(|(known, value)| known == name && !unset(value))
    }

    /// Returns the text of an object with these fields, after the fields of `set` are replaced and those of
    /// `removed` are removed.
    pub(super) fn with(&self, set: &[(&str, &str)], removed: Vec<&str>) -> Vec<u8> {
        let is_replaced =
            |name: &str| removed.contains(&name) || set.iter().any(|(other, _)| *other == name);
        let kept = self.0.iter().filter(|(name, _)| !is_replaced(name));
        let kept = kept.map(|(name, value)| (&name[..], value.get()));
        let mut text = Vec::new();
        for (name, value) in kept.chain(set.iter().copied()) {
            text.push(if text.is_empty() { b'{' } else { b',' });
            text.extend_from_slice(Value::from(name).to_string().as_bytes());
            text.push(b':');
            text.extend_from_slice(value.as_bytes());
        }
        text.push(b'}');
        text
    }

    /// Returns the bytes of the values of these fields.
    pub(super) fn len(&self, names: &[&str]) -> usize {
        let fields = self.0.iter();
        let asked = fields.filter(|(name, _)| names.contains(&&name[..]));
        asked.map(|(_, value)| value.get().len()).sum()
    }
}
