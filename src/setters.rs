//! The methods that set a field of an options struct and return the struct, so that such structs can grow fields.
//!
//! One macro, `setters!`. It validates nothing: what cannot be combined is an error where the options are used.

/// Defines a method for each field of an options struct, named as the field. `field: T` takes a value, `field: Some(T)` the
/// value of an `Option`; with `into`, what converts into it.
macro_rules! setters {
    ($type:ty { $($rest:tt)* }) => {
        impl $type { setters!(@ $($rest)*); }
    };
    (@) => {};
    (@ $(#[$doc:meta])* $field:ident: Some(into $kind:ty), $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use]
        pub fn $field(mut self, $field: impl Into<$kind>) -> Self {
            self.$field = Some($field.into());
            self
        }
        setters!(@ $($rest)*);
    };
    (@ $(#[$doc:meta])* $field:ident: Some($kind:ty), $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use]
        pub fn $field(mut self, $field: $kind) -> Self {
            self.$field = Some($field);
            self
        }
        setters!(@ $($rest)*);
    };
    (@ $(#[$doc:meta])* $field:ident: into $kind:ty, $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use]
        pub fn $field(mut self, $field: impl Into<$kind>) -> Self {
            self.$field = $field.into();
            self
        }
        setters!(@ $($rest)*);
    };
    (@ $(#[$doc:meta])* $field:ident: $kind:ty, $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use]
        pub fn $field(mut self, $field: $kind) -> Self {
            self.$field = $field;
            self
        }
        setters!(@ $($rest)*);
    };
}
