//! Setters of structures that get more fields with time.

/// For each line `with_field(field: Type);` a function that takes the structure and gives it back with the field set, to the
/// argument or to the expression behind it.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    (@ $field:ident) => { $field };
    (@ $field:ident, $value:expr) => { $value };
    ($($(#[$doc:meta])* $name:ident($field:ident: $type:ty $(, $value:expr)?);)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $field: $type) -> Self {
            self.$field = $crate::setters!(@ $field $(, $value)?);
            self
        })*
    };
}
