//! Requests to prefill engines, with the prompt and one token to generate, and the entries by which the
//! servers of both engines know each other.

use serde_json::Value;
use serde_json::value::RawValue;

use super::counters::Prefill;
use super::fields::Fields;
use super::warm::PromptBlocks;

/// Fields that concern only the answer.
const OF_THE_ANSWER: [&str; 8] = [
    "stream_options",
    "min_tokens",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "use_beam_search",
    "length_penalty",
];

/// Further fields that are not a part of the prompt.
const OF_THE_SAMPLING: [&str; 20] = [
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "user",
    "request_id",
    "metadata",
];

/// Fields with which an engine does not read its cache.
const WITHOUT_CACHE: [&str; 2] = ["prompt_logprobs", "echo"];

/// Returns the names of the fields that make the prompt, with the fields first that a conversation keeps,
/// and whether the request is a chat.
fn prompt_fields(path: &str) -> (&'static [&'static str], bool) {
    match path {
        "/v1/chat/completions" => (&["tools", "documents", "messages"], true),
        _ => (&["prompt"], false),
    }
}

/// Returns the blocks of a request's prompt; none if the body cannot be read.
pub(super) fn blocks(path: &str, body: &[u8], seed: u64) -> PromptBlocks {
    let fields = Fields::read(body);
    let is_apart = |name: &str| OF_THE_ANSWER.contains(&name) || OF_THE_SAMPLING.contains(&name);
    let blocks =
        fields.map(|fields| PromptBlocks::of(&fields, prompt_fields(path).0, is_apart, seed));
    blocks.unwrap_or_default()
}

/// Returns the body of the request to a prefill engine. The fields of the prompt are passed on byte for
/// byte: a chat's template shows the fields of tools in the order in which the client wrote them.
///
/// # Errors
/// The reason why the request goes to a decode engine only.
pub(super) fn clip(path: &str, body: &[u8], min_prompt: usize) -> Result<Vec<u8>, Prefill> {
    // The decode engine answers with the reason.
    let fields = Fields::read(body).map_err(|_| Prefill::Refused)?;
    let (prompt, is_chat) = prompt_fields(path);
    if fields.len(prompt) < min_prompt {
        return Err(Prefill::Short);
    }
    if WITHOUT_CACHE.iter().any(|name| fields.has(name)) {
        return Err(Prefill::Uncached);
    }
    let mut set = vec![("max_tokens", "1"), ("n", "1"), ("stream", "false")];
    if is_chat {
        // An engine that knows both uses this one.
        set.push(("max_completion_tokens", "1"));
    }
    let removed = OF_THE_ANSWER.iter().chain(&WITHOUT_CACHE);
    Ok(fields.with(&set, removed.copied().collect()))
}

/// Name of the field that an engine passes on to its connector.
const TRANSFER: &str = "kv_transfer_params";
/// Prefix of the names in this field that concern prefill and decode.
const OF_LEGS: &str = "lmcache.pd.";

/// Entries by which the servers of a request's two engines know each other.
pub(super) struct PairHints<'a> {
    /// Name of the decode engine's server, to which the prefill engine's server pushes.
    pub(super) to: Option<&'a str>,
    /// Present if both engines get the request at the same time.
    pub(super) wait: Option<SourceWait<'a>>,
}

/// A wait of the decode engine's server for the prefill engine's server.
pub(super) struct SourceWait<'a> {
    /// Id of the request at both servers.
    pub(super) id: &'a str,
    /// Name of the prefill engine's server.
    pub(super) peer: &'a str,
    /// Time for which the decode engine's server waits, in milliseconds.
    pub(super) wait_ms: u64,
}

impl PairHints<'_> {
    /// Returns the body for the prefill engine, made from the clipped body, and the body for the decode
    /// engine, made from the client's body, if the decode engine gets the request at the same time. Returns
    /// `None` if the client's own entries for connectors are not an object.
    pub(super) fn bodies(&self, clipped: &[u8], body: &[u8]) -> Option<(Vec<u8>, Option<Vec<u8>>)> {
        let text = |text: &str| Value::from(text).to_string();
        let id = self
            .wait
            .as_ref()
            .map(|wait| ("lmcache.pd.id", text(wait.id)));
        let to = self.to.map(|to| ("lmcache.pd.to", text(to)));
        let of_prefill: Vec<_> = id.iter().cloned().chain(to).collect();
        let prefill = with_entries(clipped, &of_prefill)?;
        let Some(wait) = &self.wait else {
            return Some((prefill, None));
        };
        let source = ("lmcache.pd.source", text(wait.peer));
        let wait = ("lmcache.pd.wait_ms", wait.wait_ms.to_string());
        let of_decode: Vec<_> = id.into_iter().chain([source, wait]).collect();
        Some((prefill, Some(with_entries(body, &of_decode)?)))
    }
}

/// Returns a client's body without its entries about prefill and decode, which would make servers wait for
/// peers or push to them; `None` if the body has no such entries.
///
/// # Errors
/// The body is not an object, or it or its entries for the connector have too many fields.
pub(super) fn without_hints(body: &[u8]) -> Result<Option<Vec<u8>>, serde_json::Error> {
    let fields = Fields::read(body)?;
    let mut has_hints = false;
    for (name, value) in fields.iter() {
        let value = value.get().as_bytes();
        if name == TRANSFER && value.starts_with(b"{") {
            let entries = Fields::read(value)?;
            has_hints |= entries.iter().any(|(name, _)| name.starts_with(OF_LEGS));
        }
    }
    Ok(has_hints.then(|| with_entries(body, &[])).flatten())
}

/// Returns a body with these entries for the engine's connector, in addition to the client's entries except
/// those about prefill and decode.
fn with_entries(body: &[u8], set: &[(&str, String)]) -> Option<Vec<u8>> {
    let fields = Fields::read(body).ok()?;
    let known = fields.get(TRANSFER).map_or("null", RawValue::get);
    let known = match known {
        "null" => Fields::default(),
        known => Fields::read(known.as_bytes()).ok()?,
    };
    let names = known.iter().map(|(name, _)| name);
    let removed = names.filter(|name| name.starts_with(OF_LEGS)).collect();
    let set: Vec<_> = set
        .iter()
        .map(|(name, value)| (*name, &value[..]))
        .collect();
    let entries = String::from_utf8(known.with(&set, removed)).ok()?;
    Some(fields.with(&[(TRANSFER, &entries)], Vec::new()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::proxy::fields::MAX_FIELDS;

    fn clipped(path: &str, body: &Value) -> Value {
        let body = serde_json::to_vec(body).expect("JSON");
        let clipped = clip(path, &body, 0).expect("a request with a prompt");
        serde_json::from_slice(&clipped).expect("JSON")
    }

    #[test]
    fn a_prefill_engine_is_asked_for_one_token_and_no_stream() {
        let asked = json!({
            "model": "m", "prompt": "text", "max_tokens": 500, "min_tokens": 20, "n": 4,
            "best_of": 4, "stream": true, "stream_options": {"include_usage": true},
            "logprobs": 5, "logprob_token_ids": [1], "prompt_logprobs": null, "echo": false,
            "temperature": 0.7, "seed": 7,
            "kv_transfer_params": {"lmcache.tag.a": "b"}, "cache_salt": "s",
        });
        let wanted = json!({
            "model": "m", "prompt": "text", "max_tokens": 1, "n": 1, "stream": false,
            "temperature": 0.7, "seed": 7, "kv_transfer_params": {"lmcache.tag.a": "b"},
            "cache_salt": "s",
        });
        assert_eq!(clipped("/v1/completions", &asked), wanted);
        let asked = json!({
            "messages": [{"role": "user", "content": "text"}], "max_completion_tokens": 500,
            "tools": [{"type": "function"}], "tool_choice": "auto", "top_logprobs": 2,
        });
        let wanted = json!({
            "messages": [{"role": "user", "content": "text"}], "max_completion_tokens": 1,
            "max_tokens": 1, "n": 1, "stream": false, "tools": [{"type": "function"}],
            "tool_choice": "auto",
        });
        assert_eq!(clipped("/v1/chat/completions", &asked), wanted);
    }

    /// Before a review, keys were sorted and large numbers rounded, which changed prompts that contain
    /// tools.
    #[test]
    fn what_makes_the_prompt_is_passed_on_byte_for_byte() {
        let tools = r#"[ {"type":"function", "b":{"zeta":1,"alpha":12345678901234567890123}} ]"#;
        let body = format!("{{\"messages\":[],\"tools\":{tools},\"n\":3,\"a\\u0062\":-0}}");
        let clipped = clip("/v1/chat/completions", body.as_bytes(), 0).expect("a request");
        let clipped = String::from_utf8(clipped).expect("text");
        assert!(clipped.contains(tools), "{clipped}");
        assert!(clipped.contains("\"ab\":-0,"), "{clipped}");
        assert_eq!(clipped.matches("\"n\":").count(), 1, "{clipped}");
    }

    #[test]
    fn both_engines_get_an_id_and_one_gets_the_others_name_next_to_the_clients_entries() {
        let hints = |to| PairHints {
            to,
            wait: Some(SourceWait {
                id: "a1b2",
                peer: "alpha",
                wait_ms: 500,
            }),
        };
        let text = |body| String::from_utf8(body).expect("text");
        let bodies = |body: &str| {
            let (prefill, decode) = hints(None).bodies(body.as_bytes(), body.as_bytes())?;
            Some((text(prefill), text(decode.expect("both are asked at once"))))
        };
        let id = r#""lmcache.pd.id":"a1b2""#;
        let wait = r#""lmcache.pd.source":"alpha","lmcache.pd.wait_ms":500"#;
        let both = |before: &str, own: &str| {
            let with =
                |entries: &str| format!("{before}\"kv_transfer_params\":{{{own}{entries}}}}}");
            Some((with(id), with(&format!("{id},{wait}"))))
        };
        assert_eq!(
            bodies(r#"{"a": -0, "b":[1 ,2]}"#),
            both(r#"{"a":-0,"b":[1 ,2],"#, "")
        );
        assert_eq!(bodies(r#"{"kv_transfer_params":null}"#), both("{", ""));
        // Byte for byte: the value is a part of the keys of chunks.
        let tag = r#""lmcache.tag.a":12345678901234567890123"#;
        let body = format!(
            "{{\"kv_transfer_params\":{{{tag},\"lmcache.pd.source\":\"other\",\"lmcache.pd.x\":1}},\"n\":2}}"
        );
        assert_eq!(bodies(&body), both(r#"{"n":2,"#, &format!("{tag},")));
        let many: Vec<String> = (0..=MAX_FIELDS).map(|at| format!("\"{at}\":0")).collect();
        let many = format!("{{\"kv_transfer_params\":{{{}}}}}", many.join(","));
        for body in ["", "[]", r#"{"kv_transfer_params":5}"#, &many] {
            assert_eq!(bodies(body), None);
        }
        let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        let body = format!("{{\"kv_transfer_params\":{{\"a\":{deep}}}}}");
        assert!(bodies(&body).is_some(), "no part of it is read");
        let pushed = |hints: PairHints<'_>| {
            let (prefill, decode) = hints.bodies(b"{}", b"{}")?;
            Some((text(prefill), decode.map(text)))
        };
        let to = r#""lmcache.pd.to":"beta""#;
        let params = |entries: &str| format!("{{\"kv_transfer_params\":{{{entries}}}}}");
        let (prefill, decode) = pushed(hints(Some("beta"))).expect("an object");
        assert_eq!(prefill, params(&format!("{id},{to}")));
        assert_eq!(decode, Some(params(&format!("{id},{wait}"))));
        let alone = PairHints {
            to: Some("beta"),
            wait: None,
        };
        assert_eq!(pushed(alone), Some((params(to), None)));
    }

    #[test]
    fn entries_of_clients_about_prefill_and_decode_are_removed() {
        let kept = |body: &str| {
            let body = without_hints(body.as_bytes()).expect("an object")?;
            Some(String::from_utf8(body).expect("text"))
        };
        for unchanged in [
            "{}",
            r#"{"prompt": "lmcache.pd.to"}"#,
            r#"{"kv_transfer_params": null}"#,
            r#"{"kv_transfer_params": "lmcache.pd.to"}"#,
            r#"{"kv_transfer_params": {"lmcache.tag.a": 1}}"#,
        ] {
            assert_eq!(kept(unchanged), None, "{unchanged}");
        }
        let wanted = r#"{"n":2,"kv_transfer_params":{"lmcache.tag.a":-0}}"#;
        for name in ["lmcache.pd.to", "lmcache.pd.source", "lmcache\\u002epd.id"] {
            let body =
                format!(r#"{{"n":2,"kv_transfer_params":{{"{name}":"x","lmcache.tag.a":-0}}}}"#);
            assert_eq!(kept(&body).as_deref(), Some(wanted));
        }
        // An engine may read more fields than the proxy does.
        let many: Vec<String> = (0..=MAX_FIELDS).map(|at| format!("\"{at}\":0")).collect();
        let many = format!("{{{}}}", many.join(","));
        let entries = format!("{{\"kv_transfer_params\":{many}}}");
        for unread in ["", "[]", "{} {}", "{\"a\":NaN}", &many, &entries] {
            assert!(without_hints(unread.as_bytes()).is_err(), "{unread}");
        }
    }

    #[test]
    fn short_prompts_and_invalid_requests_go_to_a_decode_engine_only() {
        let decided = |path, body: &str| clip(path, body.as_bytes(), 100).map(drop);
        let (text, chat) = ("/v1/completions", "/v1/chat/completions");
        for wrong in [
            "",
            "{",
            "[]",
            "{} {}",
            "{\"prompt\": 1,}",
            "{\"prompt\": \"\u{1}\"}",
        ] {
            assert_eq!(decided(text, wrong), Err(Prefill::Refused), "{wrong}");
        }
        assert_eq!(decided(text, "{}"), Err(Prefill::Short));
        let long = "x".repeat(98);
        let prompt = |text: &str| format!("{{\"prompt\": \"{text}\"}}");
        assert_eq!(decided(text, &prompt(&long[1..])), Err(Prefill::Short));
        assert_eq!(decided(text, &prompt(&long)), Ok(()));
        assert_eq!(decided(chat, &prompt(&long)), Err(Prefill::Short));
        let message = json!({"messages": [{"role": "user", "content": [{"text": long}]}]});
        assert_eq!(decided(chat, &message.to_string()), Ok(()));
        let message = json!({"prompt": long, "prompt_logprobs": 0, "echo": false});
        assert_eq!(decided(text, &message.to_string()), Err(Prefill::Uncached));
    }

    #[test]
    fn a_request_with_many_fields_or_a_deep_value_takes_no_more_memory_than_its_bytes() {
        let fields: Vec<String> = (0..=MAX_FIELDS).map(|at| format!("\"{at}\":0")).collect();
        let many = format!("{{{}}}", fields.join(","));
        let decided = |body: &str| clip("/v1/completions", body.as_bytes(), 0).map(drop);
        assert_eq!(decided(&many), Err(Prefill::Refused));
        let deep = format!(
            "{{\"prompt\": {}1{}}}",
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        // However deep it is, no part of it is read.
        assert_eq!(decided(&deep), Ok(()));
    }
}
