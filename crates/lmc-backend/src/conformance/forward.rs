//! A macro that forwards methods of a tier that wraps another tier.

/// Implements methods of [`Backend`](crate::Backend) and [`WriteBackend`](crate::WriteBackend) by the same
/// call on a field:
/// `forward!(inner: name usage close);`
#[macro_export]
macro_rules! forward {
    ($inner:tt: $($method:ident)*) => {
        $($crate::forward!(@$method $inner);)*
    };
    (@name $inner:tt) => {
        fn name(&self) -> &str {
            self.$inner.name()
        }
    };
    (@sharing $inner:tt) => {
        fn sharing(&self) -> $crate::Sharing {
            self.$inner.sharing()
        }
    };
    (@index $inner:tt) => {
        fn index(&self) -> Option<&dyn $crate::LocalIndex> {
            self.$inner.index()
        }
    };
    (@load $inner:tt) => {
        fn load(
            &self,
            items: Vec<$crate::LoadItem>,
            deadline: ::std::time::Instant,
        ) -> $crate::Answers<'_, $crate::Loaded> {
            self.$inner.load(items, deadline)
        }
    };
    (@store $inner:tt) => {
        fn store(
            &self,
            items: Vec<$crate::StoreItem>,
            deadline: ::std::time::Instant,
        ) -> $crate::Answers<'_, Result<$crate::Stored, $crate::BackendError>> {
            self.$inner.store(items, deadline)
        }
    };
    (@locate $inner:tt) => {
        fn locate<'a>(
            &'a self,
            keys: &'a [::lmc_key::ChunkKey],
            hint: &'a $crate::LocateHint,
            deadline: ::std::time::Instant,
        ) -> $crate::BoxFuture<'a, Vec<Result<$crate::Located, $crate::BackendError>>> {
            self.$inner.locate(keys, hint, deadline)
        }
    };
    (@remove $inner:tt) => {
        fn remove<'a>(
            &'a self,
            keys: &'a [::lmc_key::ChunkKey],
            deadline: ::std::time::Instant,
        ) -> $crate::BoxFuture<'a, Vec<Result<bool, $crate::BackendError>>> {
            self.$inner.remove(keys, deadline)
        }
    };
    (@clear $inner:tt) => {
        fn clear(
            &self,
            clears: ::std::sync::Arc<$crate::Clears>,
            deadline: ::std::time::Instant,
        ) -> $crate::BoxFuture<'_, Result<$crate::Cleared, $crate::BackendError>> {
            self.$inner.clear(clears, deadline)
        }
    };
    (@clears $inner:tt) => {
        fn clears(&self) -> ::std::sync::Arc<$crate::Clears> {
            self.$inner.clears()
        }
    };
    (@list $inner:tt) => {
        fn list(
            &self,
            cursor: $crate::Cursor,
            limit: usize,
            deadline: ::std::time::Instant,
        ) -> $crate::BoxFuture<'_, Result<$crate::Page, $crate::BackendError>> {
            self.$inner.list(cursor, limit, deadline)
        }
    };
    (@usage $inner:tt) => {
        fn usage(&self) -> Option<$crate::Usage> {
            self.$inner.usage()
        }
    };
    (@counters $inner:tt) => {
        fn counters(&self) -> Vec<(&'static str, u64)> {
            self.$inner.counters()
        }
    };
    (@health $inner:tt) => {
        fn health(&self) -> $crate::Health {
            self.$inner.health()
        }
    };
    (@close $inner:tt) => {
        fn close(
            &self,
            deadline: ::std::time::Instant,
        ) -> $crate::BoxFuture<'_, Result<(), $crate::BackendError>> {
            self.$inner.close(deadline)
        }
    };
}
