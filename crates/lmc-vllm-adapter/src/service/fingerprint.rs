//! Names of chunk layouts: the fields of a registration that decide what the bytes of a chunk mean.
//!
//! Where the server copies, it knows the order of a chunk's bytes, and derives the name from that
//! order. Where the engine copies, nothing on the wire describes the order (a block of vLLM may
//! have its heads before its tokens), so every field of the registration counts.

use lmc_key::LayoutFingerprint;
use lmc_memory::{ChunkOrder, GroupLayout, KvOrder, LayoutError};

use crate::protocol::{
    EngineDrivenContext, EngineGroup, IdentityDigest, RegisterKvCache, UnknownFields,
};

// The hashed bytes begin with the name of their encoding, so that two encodings never give one
// fingerprint. `lmc layout 1` named chunks of both modes and is not used again; `lmc layout 3` is
// for generations.
const BLOCKS: &[u8] = b"lmc layout 2: blocks";
const OWN_CLIENT: &[u8] = b"lmc layout 4: engine";
const TOKENS: &[u8] = b"lmc layout 5: tokens";
const ENGINE_DRIVEN: &[u8] = b"lmc layout 6: engine-driven";

/// Returns the fingerprint of an engine-driven worker's chunks.
///
/// # Errors
/// [`LayoutError`] for a layout that has no canonical description.
pub(super) fn of_engine_driven(
    context: &EngineDrivenContext,
    layout: &GroupLayout,
) -> Result<LayoutFingerprint, LayoutError> {
    // Names every field, so that a new field forces a decision here.
    let EngineDrivenContext {
        instance_id: _,
        // These fields are in keys themselves, apart from the layout.
        model_name: _,
        world_size: _,
        block_size,
        num_layers,
        hidden_dim_size,
        dtype,
        use_mla,
        num_physical_slots,
        record,
        unknown,
    } = context;
    let canonical = GroupLayout::canonical_bytes(&[*layout])?;
    let mut description;
    if let Some(record) = record {
        // The client declares the order in which it copies, so its blocks do not count.
        description = OWN_CLIENT.to_vec();
        description.extend_from_slice(&canonical);
        description.extend_from_slice(blake3::hash(record.layout.as_bytes()).as_bytes());
        description.extend_from_slice(&IdentityDigest::of(&record.identity).0);
    } else {
        description = ENGINE_DRIVEN.to_vec();
        description.extend_from_slice(&canonical);
        for number in [
            *block_size,
            *num_layers,
            *hidden_dim_size,
            u32::from(*use_mla),
        ] {
            description.extend_from_slice(&number.to_le_bytes());
        }
        let slots = num_physical_slots.map_or([0; 5], |slots| {
            let [a, b, c, d] = slots.to_le_bytes();
            [1, a, b, c, d]
        });
        description.extend_from_slice(&slots);
        push(&mut description, dtype.as_bytes());
    }
    describe_unknown(unknown, &mut description);
    Ok(LayoutFingerprint::of(&description))
}

/// Returns the fingerprint of a server-driven worker's chunks. `layers` are the indices of the
/// layers and `orders` the orders of the KV groups, as they lie in a chunk.
///
/// The table in docs/protocol.md names the fields that are left out, each with the reason why the
/// bytes of a chunk cannot depend on it.
///
/// # Errors
/// [`LayoutError`] for a layout that has no canonical description.
pub(super) fn of_server_driven(
    registration: &RegisterKvCache,
    layers: &[u32],
    orders: &[ChunkOrder],
) -> Result<LayoutFingerprint, LayoutError> {
    // Names every field, so that a new field forces a decision here.
    let RegisterKvCache {
        instance_id: _,
        kv_caches: _,
        model_name: _,
        world_size: _,
        engine_type: _,
        kv_layout: _,
        unknown_hints,
        groups,
    } = registration;
    let tokens = orders.iter().map(|order| match order {
        ChunkOrder::Tokens(layout) => Some(*layout),
        ChunkOrder::Blocks { .. } => None,
    });
    let mut description;
    if let Some(layouts) = tokens.collect::<Option<Vec<_>>>() {
        description = TOKENS.to_vec();
        description.extend_from_slice(&GroupLayout::canonical_bytes(&layouts)?);
    } else {
        description = BLOCKS.to_vec();
        for order in orders {
            let (layout, within) = match order {
                ChunkOrder::Tokens(layout) => (layout, [0; 4]),
                ChunkOrder::Blocks {
                    blocks,
                    heads,
                    block_tokens,
                    inner_planes,
                    order,
                } => {
                    let order = match order {
                        KvOrder::TokensFirst => 1,
                        KvOrder::HeadsFirst => 2,
                    };
                    (blocks, [*heads, *block_tokens, *inner_planes, order])
                }
            };
            description.extend_from_slice(&GroupLayout::canonical_bytes(&[*layout])?);
            for number in within {
                description.extend_from_slice(&number.to_le_bytes());
            }
        }
    }
    // The order of the layers in a chunk, unless each lies at its own index.
    if !layers.iter().copied().eq(0..layers.len() as u32) {
        description.extend_from_slice(b"layers");
        for layer in layers {
            description.extend_from_slice(&layer.to_le_bytes());
        }
    }
    describe_unknown(unknown_hints, &mut description);
    for (index, group) in groups.iter().enumerate() {
        // The other fields are covered by `layers` and `orders`, or by the page's table.
        let EngineGroup {
            engine_group_id: _,
            layer_indices: _,
            tokens_per_block: _,
            sw_size_tokens,
            extra_object_group_tag,
            recurrent_state: _,
            unknown,
        } = group;
        // Nothing is stored of engines whose blocks may change before they are copied. Earlier
        // versions did store their chunks, so such chunks get another name here.
        if *sw_size_tokens >= 0 {
            description.extend_from_slice(format!("window of group {index}").as_bytes());
            description.extend_from_slice(&sw_size_tokens.to_le_bytes());
        }
        if *extra_object_group_tag != 0 {
            description.extend_from_slice(format!("tag of group {index}").as_bytes());
            description.extend_from_slice(&extra_object_group_tag.to_le_bytes());
        }
        if *unknown != UnknownFields::default() {
            description.extend_from_slice(format!("group {index}").as_bytes());
            describe_unknown(unknown, &mut description);
        }
    }
    Ok(LayoutFingerprint::of(&description))
}

/// Returns the shape to show for a chunk of this order.
pub(super) fn shape(order: ChunkOrder) -> Vec<u64> {
    match order {
        ChunkOrder::Tokens(layout) | ChunkOrder::Blocks { blocks: layout, .. } => layout.shape(),
    }
}

/// Adds the fields that this version does not know.
fn describe_unknown(UnknownFields(fields): &UnknownFields, description: &mut Vec<u8>) {
    for (name, value) in fields {
        description.extend_from_slice(b"unknown");
        push(description, name.as_bytes());
        push(description, value);
    }
}

fn push(description: &mut Vec<u8>, bytes: &[u8]) {
    description.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    description.extend_from_slice(bytes);
}
