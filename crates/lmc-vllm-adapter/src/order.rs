//! Names of the orders in which lmc's own client copies the elements of a chunk.

use lmc_memory::{ChunkOrder, GroupLayout, KvOrder};

/// Separator between the KV groups and the order in the name of a layout.
pub(crate) const AFTER_GROUPS: &str = ": ";

const TOKENS: &str = "tokens";
const ORDERS: [(KvOrder, &str); 2] = [
    (KvOrder::TokensFirst, "tokens-heads"),
    (KvOrder::HeadsFirst, "heads-tokens"),
];

/// Names an order. Two chunks have the same meaning exactly if their names and shapes are equal.
pub(crate) fn name_order(order: ChunkOrder) -> (GroupLayout, String) {
    match order {
        ChunkOrder::Tokens(layout) => (layout, TOKENS.to_owned()),
        ChunkOrder::Blocks {
            blocks,
            heads,
            block_tokens,
            inner_planes,
            order,
        } => {
            let name = ORDERS.iter().find(|(known, _)| *known == order);
            let (_, name) = name.expect("the table holds every order");
            let text =
                format!("blocks {name} heads={heads} tokens={block_tokens} planes={inner_planes}");
            (blocks, text)
        }
    }
}

/// Returns the order of a name; `None` for a name that [`name_order`] does not give.
#[cfg(feature = "service")]
pub(crate) fn parse_order(name: &str, layout: GroupLayout) -> Option<ChunkOrder> {
    if name == TOKENS {
        return Some(ChunkOrder::Tokens(layout));
    }
    let mut words = name.split(' ');
    let is_blocks = words.next() == Some("blocks");
    let order = words.next().filter(|_| is_blocks)?;
    let (order, _) = ORDERS.iter().find(|(_, known)| *known == order)?;
    let mut number = |name: &str| -> Option<u64> {
        let (found, value) = words.next()?.split_once('=')?;
        value.parse().ok().filter(|_| found == name)
    };
    let order = ChunkOrder::Blocks {
        heads: number("heads")?,
        block_tokens: number("tokens")?,
        inner_planes: number("planes")?,
        order: *order,
        blocks: layout,
    };
    // Names of one order never differ.
    (name_order(order).1 == name).then_some(order)
}

#[cfg(all(test, feature = "service"))]
mod tests {
    use lmc_memory::{DType, Planes};

    use super::*;

    #[test]
    fn names_come_back() {
        let layout = GroupLayout::new(Planes::Fused, 2, 16, 64, DType::BFloat16).unwrap();
        let mut orders = vec![ChunkOrder::Tokens(layout)];
        orders.extend(ORDERS.map(|(order, _)| ChunkOrder::Blocks {
            blocks: layout,
            heads: 4,
            block_tokens: 8,
            inner_planes: 2,
            order,
        }));
        for order in orders {
            let (_, name) = name_order(order);
            assert_eq!(parse_order(&name, layout), Some(order));
        }
        for name in [
            "",
            "token",
            "tokens ",
            "blocks",
            "blocks heads-tokens",
            "blocks tokens heads=4 tokens=8 planes=2",
            "blocks heads-tokens tokens=8 heads=4 planes=2",
            "blocks heads-tokens heads=+4 tokens=8 planes=2",
            "blocks heads-tokens heads=4 tokens=8 planes=2 more",
            "blocks heads-tokens heads=99999999999999999999 tokens=8 planes=2",
        ] {
            assert_eq!(parse_order(name, layout), None, "{name}");
        }
    }
}
