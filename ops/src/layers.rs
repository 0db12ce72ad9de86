//! Layers of tensors with any number of dims.

/// Implements [`Layer`](crate::Layer), on plain and sharded tensors of any number of dims, for modules that keep
/// this number.
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
