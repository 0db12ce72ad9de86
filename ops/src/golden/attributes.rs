//! Options of a golden case.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

use halocline_core::{Boundary, Error, Result};

use crate::driver::Padding;

/// Options of an operator: numbers, with true and false as 1 and 0, and texts.
#[derive(Clone, Debug, Default)]
pub struct Attributes {
    /// Numbers by key, either one or one per dim.
    pub numbers: HashMap<String, Vec<f64>>,
    /// Texts by key.
    pub texts: HashMap<String, String>,
}

/// Attributes of a case, with a record of those its operator read. An attribute that is never read,
/// or whose value the operator does not know, is an error.
#[derive(Debug)]
pub struct Options<'a> {
    attributes: &'a Attributes,
    read: RefCell<BTreeSet<String>>,
    refused: RefCell<Option<String>>,
}

impl<'a> Options<'a> {
    pub(super) fn new(attributes: &'a Attributes) -> Self {
        Self {
            attributes,
            read: RefCell::default(),
            refused: RefCell::default(),
        }
    }

    /// Requires that the operator read every attribute and knew its value.
    pub(super) fn require_honoured(&self, operator: &str) -> Result<()> {
        if let Some(refused) = self.refused.take() {
            return Err(Error::operator(operator, refused));
        }
        let read = self.read.borrow();
        let Attributes { numbers, texts } = self.attributes;
        let mut all = numbers.keys().chain(texts.keys());
        match all.find(|key| !read.contains(*key)) {
            None => Ok(()),
            Some(key) => {
                let message = format!("attribute \"{key}\"; expected of {read:?}");
                Err(Error::operator(operator, message))
            }
        }
    }

    /// Marks a value as unknown, which makes the case an error.
    fn refuse(&self, key: &str, value: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug) {
        let message = format!("attribute \"{key}\" is {value:?}; expected {expected:?}");
        self.refused.borrow_mut().get_or_insert(message);
    }

    fn mark(&self, key: &str) {
        self.read.borrow_mut().insert(key.into());
    }

    /// Returns the numbers under `key`; empty if there are none.
    pub fn numbers(&self, key: &str) -> &'a [f64] {
        self.mark(key);
        self.attributes.numbers.get(key).map_or(&[], Vec::as_slice)
    }

    /// Returns the first of the numbers under `key`.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.numbers(key).first().copied()
    }

    /// Whether `key` is true.
    pub fn is(&self, key: &str) -> bool {
        self.number(key) == Some(1.0)
    }

    /// Returns the text under `key`; empty if there is none.
    pub fn text(&self, key: &str) -> &'a str {
        self.mark(key);
        self.attributes.texts.get(key).map_or("", String::as_str)
    }

    /// Returns the value of the choice named by the text under `key`; the first choice if there is
    /// no such text.
    pub(crate) fn choice<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> T {
        let text = self.text(key);
        let found = choices.iter().find(|(name, _)| *name == text);
        if found.is_none() && !text.is_empty() {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            self.refuse(key, &text, &names);
        }
        found.unwrap_or(&choices[0]).1
    }

    /// Returns the non-negative integers under `key`; empty if there are none.
    pub fn list(&self, key: &str) -> Vec<usize> {
        let numbers = self.numbers(key);
        let wrong = |number: &f64| *number < 0.0 || number.fract() != 0.0;
        if numbers.iter().any(wrong) {
            self.refuse(key, &numbers, &"whole numbers from zero on");
        }
        numbers.iter().map(|number| *number as usize).collect()
    }

    /// Returns the dim under `key`, by default the last of `dims`. Negative dims count from the
    /// end.
    pub(crate) fn dim(&self, key: &str, dims: usize) -> usize {
        self.place_or(key, dims, dims.saturating_sub(1))
    }

    /// Returns the dims under `key`, by default all. Negative dims count from the end.
    pub(crate) fn dims(&self, key: &str, dims: usize) -> Vec<usize> {
        match self.numbers(key) {
            [] => (0..dims).collect(),
            numbers => {
                let numbers = numbers.iter();
                numbers.map(|dim| self.resolved(key, *dim, dims)).collect()
            }
        }
    }

    /// Returns the index below `count` under `key`, or `default`. Negative indices count from the
    /// end.
    pub(crate) fn place_or(&self, key: &str, count: usize, default: usize) -> usize {
        self.number(key)
            .map_or(default, |place| self.resolved(key, place, count))
    }

    /// Returns the index below `count` under `key`. Negative indices count from the end; a missing
    /// one is refused.
    pub(crate) fn place(&self, key: &str, count: usize) -> usize {
        let place = self.number(key).unwrap_or(f64::NAN);
        self.resolved(key, place, count)
    }

    /// Returns the bound of a range of `size` cells under `key`, or `default`. Negative bounds
    /// count from the end; the result is clamped to the range.
    pub(crate) fn bound_or(&self, key: &str, size: usize, default: usize) -> usize {
        let bound = self.number(key).unwrap_or(default as f64);
        if bound.fract() != 0.0 {
            self.refuse(key, &bound, &"a whole number");
        }
        from_start(bound, size).clamp(0.0, size as f64) as usize
    }

    fn resolved(&self, key: &str, place: f64, count: usize) -> usize {
        let found = from_start(place, count);
        if place.fract() != 0.0 || !(0.0..count as f64).contains(&found) {
            self.refuse(key, &place, &format!("a place below {count}"));
            return 0;
        }
        found as usize
    }

    /// Returns the first and last of the dims to flatten, by default the last two dims.
    pub(crate) fn flattened(&self, dims: usize) -> [usize; 2] {
        let last = dims.saturating_sub(1);
        let start = self.place_or("start_dim", dims, last.saturating_sub(1));
        [start, self.place_or("end_dim", dims, last)]
    }

    /// Returns the sizes under `key`, with −1 replaced by the result of `kept`.
    pub(crate) fn sizes(&self, key: &str, kept: impl Fn(usize) -> usize) -> Vec<usize> {
        let sizes = self.numbers(key);
        let wrong = |size: &f64| *size < -1.0 || size.fract() != 0.0;
        if sizes.iter().any(wrong) {
            self.refuse(key, &sizes, &"whole numbers from zero on, and −1");
        }
        let sizes = sizes.iter().enumerate();
        let sizes = sizes.map(|(dim, size)| {
            if *size == -1.0 {
                kept(dim)
            } else {
                *size as usize
            }
        });
        sizes.collect()
    }

    /// Requires that the list under `key`, if any, is the only one that the operator knows.
    pub(crate) fn require(&self, key: &str, expected: &[usize]) {
        let found = self.list(key);
        if !found.is_empty() && found != expected {
            self.refuse(key, &found, &expected);
        }
    }

    /// Returns the integers under `key`, one per spatial dim, or `default` for each.
    pub fn array<const N: usize>(&self, key: &str, default: usize) -> [usize; N] {
        self.array_or(key, [default; N])
    }

    /// Returns the integers under `key`, one per spatial dim, or `default`. A single number applies
    /// to all dims.
    pub(crate) fn array_or<const N: usize>(&self, key: &str, default: [usize; N]) -> [usize; N] {
        match self.list(key)[..] {
            [] => default,
            [one] => [one; N],
            ref list => list.try_into().unwrap_or_else(|_| {
                self.refuse(key, &list, &format!("{N} numbers"));
                default
            }),
        }
    }

    /// Returns the boundary under `key`, by its name in PyTorch.
    pub(crate) fn boundary(&self, key: &str) -> Boundary {
        let choices = [
            ("zeros", Boundary::Zeros),
            ("constant", Boundary::Zeros),
            ("circular", Boundary::Periodic),
            ("reflect", Boundary::Reflect),
            ("replicate", Boundary::Replicate),
        ];
        self.choice(key, &choices)
    }

    /// Returns the padding of pooling or a convolution, alike on both sides.
    pub(crate) fn padding<const N: usize>(&self) -> [Padding; N] {
        let boundary = self.boundary("padding_mode");
        let widths = self.array("padding", 0);
        widths.map(|width| Padding::new(width, boundary))
    }
}

/// Converts an index to count from the start; negative ones count from the end.
fn from_start(place: f64, count: usize) -> f64 {
    if place < 0.0 {
        place + count as f64
    } else {
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(numbers: &[(&str, &[f64])]) -> Attributes {
        let numbers = numbers.iter();
        Attributes {
            numbers: numbers
                .map(|(key, list)| ((*key).into(), list.to_vec()))
                .collect(),
            ..Attributes::default()
        }
    }

    #[test]
    fn dims_and_places_count_from_the_end() {
        let attributes = attributes(&[
            ("dims", &[-1.0, 0.0]),
            ("start", &[-9.0]),
            ("end", &[20.0]),
            ("size", &[-1.0, 4.0]),
            ("start_dim", &[1.0]),
        ]);
        let options = Options::new(&attributes);
        assert_eq!(options.dims("dims", 3), [2, 0]);
        assert_eq!(options.dims("others", 3), [0, 1, 2]);
        assert_eq!(options.dim("dim", 3), 2);
        assert_eq!(options.bound_or("start", 13, 0), 4);
        assert_eq!(options.bound_or("start", 5, 0), 0);
        assert_eq!(options.bound_or("end", 13, 13), 13);
        assert_eq!(options.sizes("size", |dim| dim + 7), [7, 4]);
        assert_eq!(options.flattened(4), [1, 3]);
        assert_eq!(options.place_or("dim", 3, 1), 1);
        options.require_honoured("test").unwrap();
    }

    #[test]
    fn what_is_no_place_is_refused() {
        for (number, key) in [(1.5, "dim"), (3.0, "dim"), (-4.0, "dim"), (1.0, "index")] {
            let attributes = attributes(&[(key, &[number])]);
            let options = Options::new(&attributes);
            options.place("dim", 3);
            assert!(options.require_honoured("test").is_err(), "{key} {number}");
        }
        let attributes = attributes(&[("shape", &[-2.0])]);
        let options = Options::new(&attributes);
        options.sizes("shape", |_| 1);
        assert!(options.require_honoured("test").is_err());
    }
}
