//! Layers on tensors of any number of dims, and access to private fields of burn's modules.

use std::str::FromStr;

use burn::module::{Content, DisplaySettings};

/// Reads a private field of one of burn's modules from its displayed `content`.
///
/// # Panics
/// Panics if the module does not show the field.
pub(crate) fn displayed<T: FromStr>(
    content: impl FnOnce(Content) -> Option<Content>,
    field: &str,
) -> T {
    let content = content(Content::new(DisplaySettings::new()));
    let attributes = content.into_iter().flat_map(|content| content.attributes);
    let mut values = attributes.filter(|attribute| attribute.name == field);
    let value = values.next().and_then(|found| found.value.parse().ok());
    value.unwrap_or_else(|| panic!("expected burn's module to display its {field}"))
}

/// Implements [`Layer`](crate::Layer), on plain and sharded tensors of any number of dims, for
/// modules that keep the number of dims.
macro_rules! layers {
    ($($module:ty: |$layer:pat_param, $x:ident| $result:expr;)*) => {
        $(impl<X: $crate::AnyDims> $crate::Layer<X> for $module {
            type Output = X;

            #[track_caller]
            fn forward(&self, x: X) -> X {
                struct Applied<'a>(&'a $module);

                impl $crate::DimGeneric for Applied<'_> {
                    #[track_caller]
                    fn call<const D: usize, X: $crate::Field<D>>(self, $x: X) -> X {
                        let $layer = self.0;
                        $result
                    }
                }

                x.apply_any_dims(Applied(self))
            }
        })*
    };
}
pub(crate) use layers;
