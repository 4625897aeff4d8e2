//! `lmc plan`: the size of a model's KV cache, computed from its config.json.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use lmc_key::Printable;
use serde_json::{Value, json};

use super::format::duration;
use crate::config::{GIB, human_bytes, parse_bytes};
use crate::stdout::{out, outln};

pub(super) const HELP: &str = "\
MODEL is a model's folder or its config.json, in Hugging Face's format:
  lmc plan ~/models/Qwen3-8B --prompts 2000 --tokens 8000
  lmc plan config.json --tensor-parallel-size 4 --kv-cache-dtype fp8 --size 500GiB

The figures are computed from that file only. `lmc status` shows the real figures of a running engine: the
bytes of a chunk of each worker.";

/// Remedy if this command does not know the sizes.
const STATUS: &str = "start the engine, and read the size of a chunk in `lmc status`";
/// Largest config.json that is read.
const MAX_CONFIG: u64 = 4 << 20;
/// Sizes of a cache that are shown without `--size`.
const SIZES: [u64; 5] = [16 * GIB, 64 * GIB, 256 * GIB, 1024 * GIB, 4096 * GIB];
/// Kinds of memory and networks, with the bytes that each moves in a second.
const SPEEDS: [(&str, f64); 5] = [
    ("memory of this host", 20e9),
    ("an NVMe drive", 6e9),
    ("a network of 100 Gbit/s", 12.5e9),
    ("a network of 25 Gbit/s", 3.1e9),
    ("a network of 10 Gbit/s", 1.25e9),
];

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The model's folder, or its config.json.
    model: PathBuf,
    /// Tokens of a prompt.
    #[arg(long, value_name = "N", default_value_t = 8000, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    tokens: u64,
    /// Number of prompts to keep.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    prompts: u64,
    /// Number of tokens at the start that all prompts share, such as a system prompt; they are kept once.
    #[arg(long, value_name = "N", default_value_t = 0)]
    shared: u64,
    /// Element type of the KV cache, as in vLLM's flag of this name.
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = Element::Auto)]
    kv_cache_dtype: Element,
    /// Tensor parallelism of the engine.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1024))]
    tensor_parallel_size: u64,
    /// Tokens of a chunk (--chunk-size of lmc serve).
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    chunk_size: u64,
    /// A size of the cache, such as 500GiB; repeatable. A bare number is GiB.
    #[arg(long, value_name = "SIZE", value_parser = |text: &str| parse_bytes(text, GIB))]
    size: Vec<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Element type of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Element {
    /// As the model's dtype; 2 bytes for a float32 model, as in vLLM
    Auto,
    Float32,
    Float16,
    Bfloat16,
    #[value(alias = "fp8_e4m3", alias = "fp8_e5m2")]
    Fp8,
}

/// The KV cache of a model.
#[derive(Debug, PartialEq, Eq)]
struct Cache {
    layers: u64,
    kind: Kind,
    element: Element,
}

/// Content of a layer for one token.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// A key and a value for each head.
    Heads { heads: u64, size: u64 },
    /// One vector for all heads (MLA).
    Latent { size: u64 },
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let path = match arguments.model.is_dir() {
        true => arguments.model.join("config.json"),
        false => arguments.model.clone(),
    };
    let config = read(&path)?;
    let cache = Cache::of(&config, arguments.kv_cache_dtype)
        .with_context(|| format!("{}", path.display()))?;
    let plan = Plan::of(arguments, &cache)?;
    match arguments.json {
        true => outln!("{}", serde_json::to_string_pretty(&plan.json())?),
        false => out!("{}", plan.text(&cache)),
    }
    Ok(())
}

fn read(path: &Path) -> Result<Value> {
    let shown = path.display();
    let found = fs::metadata(path).with_context(|| {
        format!("cannot read {shown}: expected a model's folder, or its config.json; the folder of a downloaded model is in \
             ~/.cache/huggingface/hub/models--*/snapshots")
    })?;
    ensure!(
        found.is_file() && found.len() <= MAX_CONFIG,
        "{shown} is not a config.json: expected a file of at most {}",
        human_bytes(MAX_CONFIG)
    );
    let text = fs::read(path).with_context(|| format!("cannot read {shown}"))?;
    serde_json::from_slice(&text).with_context(|| format!("{shown} is not valid JSON"))
}

impl Cache {
    /// Reads a model's configuration.
    ///
    /// # Errors
    /// The configuration does not give the size of some layers, or lmc does not keep such layers.
    fn of(config: &Value, element: Element) -> Result<Self> {
        // In models that also take images, the language model's configuration is a field.
        let text = ["text_config", "llm_config", "language_config"];
        let text = text.iter().map(|name| &config[*name]);
        let text = text.clone().find(|part| part.is_object()).unwrap_or(config);
        refuse_unknown(text)?;
        let number = |names: &[&str]| names.iter().find_map(|name| whole(&text[*name]));
        let kv_heads = [
            "num_key_value_heads",
            "num_kv_heads",
            "n_head_kv",
            "multi_query_group_num",
        ];
        let unread = kv_heads
            .iter()
            .find(|name| !text[**name].is_null() && whole(&text[**name]).is_none());
        if let Some(name) = unread {
            bail!("its {name} is not a number: {STATUS}");
        }
        let layers = number(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"])
            .context("it has no num_hidden_layers")?;
        let without = number(&["num_kv_shared_layers"]).unwrap_or(0);
        let layers = layers
            .checked_sub(without)
            .context("num_kv_shared_layers is more than num_hidden_layers")?;
        let kind = match number(&["kv_lora_rank"]) {
            Some(rank) => Kind::Latent {
                size: rank + number(&["qk_rope_head_dim"]).context("it has no qk_rope_head_dim")?,
            },
            None => {
                let all = number(&["num_attention_heads", "n_head", "n_heads"]);
                let heads = match (&text["multi_query"], &text["new_decoder_architecture"]) {
                    (Value::Bool(true), other) if *other != true => Some(1),
                    _ => number(&kv_heads).or(all),
                };
                let size = number(&["head_dim", "kv_channels"]).or_else(|| {
                    let width = number(&["hidden_size", "n_embd", "d_model"])?;
                    let all = all.filter(|&all| all > 0 && width % all == 0)?;
                    Some(width / all)
                });
                Kind::Heads {
                    heads: heads
                        .context("it has neither num_key_value_heads nor num_attention_heads")?,
                    size: size.context(
                        "it has neither head_dim nor a hidden_size that its heads divide",
                    )?,
                }
            }
        };
        let element = match element {
            Element::Auto => Element::of_model(text, config)?,
            given => given,
        };
        let cache = Self {
            layers,
            kind,
            element,
        };
        ensure!(
            cache.token(1).is_some_and(|bytes| bytes > 0),
            "its number of layers or heads is 0, or too large"
        );
        Ok(cache)
    }

    /// Returns the bytes of a token on all ranks together; `None` if the number is impossibly large.
    fn token(&self, ranks: u64) -> Option<u64> {
        let elements = match self.kind {
            // Each rank has at least one head; with more ranks than heads, ranks share heads.
            Kind::Heads { heads, size } => heads
                .div_ceil(ranks)
                .checked_mul(ranks)?
                .checked_mul(size)?
                .checked_mul(2)?,
            // The same on all ranks, and kept once.
            Kind::Latent { size } => size,
        };
        elements
            .checked_mul(self.layers)?
            .checked_mul(self.element.bytes())
            .filter(|&bytes| bytes < 1 << 32)
    }

    fn text(&self) -> String {
        let Self { layers, kind, .. } = self;
        let element = self.element.name();
        match kind {
            Kind::Heads { heads, size } => {
                format!("{layers} layers, {heads} KV heads of {size}, {element}")
            }
            Kind::Latent { size } => format!("{layers} layers of MLA, {size} wide, {element}"),
        }
    }
}

/// Refuses configurations that do not give the size of some layers.
fn refuse_unknown(text: &Value) -> Result<()> {
    let known = [
        "full_attention",
        "sliding_attention",
        "attention",
        "full",
        "sliding",
    ];
    for list in ["layer_types", "layers_block_type", "block_types"] {
        let kinds = text[list].as_array().into_iter().flatten();
        let other = kinds
            .filter_map(Value::as_str)
            .find(|kind| !known.contains(kind));
        if let Some(kind) = other {
            bail!(
                "it has layers of the kind {}, whose KV cache lmc does not keep",
                Printable(kind)
            );
        }
    }
    let unclear = [
        // Some layers have no attention.
        "full_attention_interval",
        "attn_layer_period",
        "hybrid_override_pattern",
        "ssm_cfg",
        "state_size",
        "mamba_d_state",
        "attention_chunk_size",
        // Layers of several sizes.
        "block_configs",
        "global_head_dim",
        "num_global_key_value_heads",
        "index_topk",
        "num_key_value_heads_per_layer",
        "hybrid_layer_pattern",
        // Layers of linear attention.
        "attn_type_list",
        "linear_attn_config",
    ];
    let found = unclear
        .iter()
        .find(|name| !matches!(&text[**name], Value::Null));
    if let Some(name) = found {
        bail!(
            "its {name} means layers of several kinds or sizes, and this command does not know their \
             bytes: {STATUS}"
        );
    }
    let differs = |name: &str| whole(&text["head_dim"]) != whole(&text[name]);
    ensure!(
        text["v_head_dim"].is_null() || !text["kv_lora_rank"].is_null() || !differs("v_head_dim"),
        "its keys and values have different sizes: {STATUS}"
    );
    ensure!(
        text["is_encoder_decoder"] != true,
        "it has an encoder, whose KV cache lmc does not keep"
    );
    Ok(())
}

/// Reads a number of at most 32 bits, so that products of three do not overflow.
fn whole(value: &Value) -> Option<u64> {
    value.as_u64().filter(|&number| number <= u32::MAX.into())
}

impl Element {
    fn of_model(text: &Value, config: &Value) -> Result<Self> {
        let named = [text, config].into_iter();
        let mut named = named.flat_map(|part| [&part["dtype"], &part["torch_dtype"]]);
        let Some(name) = named.find_map(Value::as_str) else {
            bail!("it names no dtype: set --kv-cache-dtype");
        };
        match name.trim_start_matches("torch.") {
            "bfloat16" => Ok(Self::Bfloat16),
            "float16" | "half" | "float32" | "float" => Ok(Self::Float16),
            other => bail!(
                "its dtype is {}, which this command does not know: set --kv-cache-dtype",
                Printable(other)
            ),
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::Auto | Self::Float16 | Self::Bfloat16 => 2,
            Self::Fp8 => 1,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Fp8 => "fp8",
        }
    }
}

/// Bytes of a model's tokens, chunks and prompts.
#[derive(Debug)]
struct Plan {
    token: u64,
    chunk: u64,
    chunk_tokens: u64,
    /// Tokens of a prompt, and its tokens after the last whole chunk.
    tokens: u64,
    tail: u64,
    prompt: u64,
    prompts: u64,
    /// Chunks that all prompts share at the start, and further chunks of each prompt.
    shared: u64,
    own: u64,
    sizes: Vec<u64>,
}

impl Plan {
    fn of(arguments: &Arguments, cache: &Cache) -> Result<Self> {
        let &Arguments {
            tokens,
            prompts,
            shared,
            chunk_size,
            ..
        } = arguments;
        ensure!(
            shared <= tokens,
            "--shared {shared} is more than --tokens {tokens}"
        );
        ensure!(
            tokens >= chunk_size,
            "--tokens {tokens}: expected at least one chunk of {chunk_size} tokens (--chunk-size); a shorter prompt is not kept"
        );
        let ranks = arguments.tensor_parallel_size;
        let token = cache.token(ranks);
        let token = token.with_context(|| {
            format!("--tensor-parallel-size {ranks}: a token takes too many bytes")
        })?;
        let chunk = token * chunk_size;
        let shared = shared / chunk_size;
        let own = tokens / chunk_size - shared;
        let sizes = match arguments.size.is_empty() {
            true => SIZES.to_vec(),
            false => arguments.size.clone(),
        };
        Ok(Self {
            token,
            chunk,
            chunk_tokens: chunk_size,
            tokens,
            tail: tokens % chunk_size,
            prompt: (shared + own) * chunk,
            prompts,
            shared,
            own,
            sizes,
        })
    }

    /// Returns the tokens and the prompts that a cache of this size holds.
    fn held(&self, size: u64) -> (u64, u64) {
        let chunks = size / self.chunk;
        let prompts = match chunks.checked_sub(self.shared) {
            None => 0,
            // All kept chunks are shared.
            Some(_) if self.own == 0 => self.prompts,
            Some(left) => left / self.own,
        };
        (chunks * self.chunk_tokens, prompts)
    }

    /// Returns the bytes of all prompts.
    fn all(&self) -> u64 {
        let own = self.own.saturating_mul(self.prompts);
        own.saturating_add(self.shared).saturating_mul(self.chunk)
    }

    fn json(&self) -> Value {
        let sizes = self.sizes.iter().map(|&size| {
            let (tokens, prompts) = self.held(size);
            json!({"bytes": size, "tokens": tokens, "prompts": prompts})
        });
        json!({
            "token_bytes": self.token,
            "chunk_bytes": self.chunk,
            "prompt_bytes": self.prompt,
            "prompt_tail_tokens": self.tail,
            "all_prompts_bytes": self.all(),
            "sizes": sizes.collect::<Vec<_>>(),
        })
    }

    fn text(&self, cache: &Cache) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let mut line = |name: &str, value: String| {
            let _ = writeln!(out, "{name:<13}{value}");
        };
        line("model", cache.text());
        line("a token", human_bytes(self.token));
        let tokens = self.chunk_tokens;
        line(
            "a chunk",
            format!("{} ({tokens} tokens)", human_bytes(self.chunk)),
        );
        let tail = match self.tail {
            0 => String::new(),
            tail => format!("; LMCache's connector does not cache the last {tail}"),
        };
        line(
            "a prompt",
            format!(
                "{} ({} tokens{tail})",
                human_bytes(self.prompt),
                self.tokens
            ),
        );
        if self.prompts > 1 {
            line(
                "all prompts",
                format!("{} ({} prompts)", human_bytes(self.all()), self.prompts),
            );
        }
        let _ = writeln!(
            out,
            "\n{:<14}{:>16}{:>12}",
            "a cache of", "holds tokens", "prompts"
        );
        for &size in &self.sizes {
            let (tokens, prompts) = self.held(size);
            let _ = writeln!(out, "{:<14}{tokens:>16}{prompts:>12}", human_bytes(size));
        }
        let _ = writeln!(
            out,
            "\n{:<36}{:>10}   faster than an engine that computes fewer than",
            "a prompt is read from", "in"
        );
        for (name, speed) in SPEEDS {
            let seconds = duration(self.prompt as f64 / speed);
            let rate = speed / self.token as f64;
            let from = format!("{name} ({} GB/s)", speed / 1e9);
            let _ = writeln!(out, "{from:<36}{seconds:>10}   {rate:.0} tokens/s");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(config: Value) -> Result<Cache> {
        Cache::of(&config, Element::Auto)
    }

    #[test]
    fn models_of_each_kind_have_the_bytes_that_vllm_gives_them() -> Result<()> {
        // Their published configurations, and bytes of a token.
        let models = [
            (
                json!({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                       "hidden_size": 4096, "torch_dtype": "bfloat16"}),
                128 << 10,
            ),
            (
                json!({"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                       "hidden_size": 4096, "head_dim": 128, "dtype": "bfloat16"}),
                144 << 10,
            ),
            (
                json!({"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
                       "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 7168,
                       "torch_dtype": "bfloat16"}),
                61 * 576 * 2,
            ),
            (
                json!({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {
                       "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
                       "head_dim": 256, "hidden_size": 3840,
                       "layer_types": ["sliding_attention", "full_attention"]}}),
                48 * 2 * 8 * 256 * 2,
            ),
            (
                json!({"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}),
                12 * 2 * 768 * 2,
            ),
        ];
        for (config, bytes) in models {
            assert_eq!(cache(config.clone())?.token(1), Some(bytes), "{config}");
        }
        Ok(())
    }

    #[test]
    fn ranks_share_heads_and_keep_one_latent_vector() -> Result<()> {
        let of = |config: Value, ranks| Ok::<_, anyhow::Error>(cache(config)?.token(ranks));
        let heads = json!({"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8,
                           "dtype": "bfloat16"});
        let one = of(heads.clone(), 1)?;
        assert_eq!(of(heads.clone(), 4)?, one);
        assert_eq!(of(heads, 8)?, one.map(|bytes| 2 * bytes));
        let latent = json!({"num_hidden_layers": 2, "kv_lora_rank": 4, "qk_rope_head_dim": 2,
                            "dtype": "bfloat16"});
        assert_eq!(of(latent.clone(), 8)?, of(latent, 1)?);
        Ok(())
    }

    #[test]
    fn shared_chunks_of_prompts_are_kept_once() {
        let plan = Plan {
            token: 2,
            chunk: 32,
            chunk_tokens: 16,
            tokens: 100,
            tail: 4,
            prompt: 6 * 32,
            prompts: 10,
            shared: 2,
            own: 4,
            sizes: Vec::new(),
        };
        assert_eq!(plan.all(), (2 + 10 * 4) * 32);
        assert_eq!(plan.held(plan.all()), (42 * 16, 10));
        assert_eq!(plan.held(plan.all() - 1), (41 * 16, 9));
        assert_eq!(plan.held(0), (0, 0));
    }

    #[test]
    fn unknown_layers_are_refused_with_a_reason() {
        let base = json!({"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8,
                          "dtype": "bfloat16"});
        let with = |name: &str, value: Value| {
            let mut config = base.clone();
            config[name] = value;
            cache(config).expect_err(name).to_string()
        };
        let said = with("layer_types", json!(["linear_attention"]));
        assert!(said.contains("linear_attention"), "{said}");
        let said = with("block_configs", json!([{}]));
        assert!(said.contains("lmc status"), "{said}");
        let said = with("dtype", json!("int4"));
        assert!(said.contains("--kv-cache-dtype"), "{said}");
        for (name, value) in [
            ("num_hidden_layers", json!(null)),
            ("num_hidden_layers", json!(0)),
            ("num_hidden_layers", json!(-1)),
            ("num_hidden_layers", json!(u64::MAX)),
            ("head_dim", json!(u32::MAX)),
            ("num_kv_shared_layers", json!(3)),
            ("is_encoder_decoder", json!(true)),
            ("num_kv_heads", json!([4, 2])),
            ("v_head_dim", json!(16)),
            ("linear_attn_config", json!({})),
        ] {
            with(name, value);
        }
    }
}
