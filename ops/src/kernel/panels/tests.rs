use burn_std::bf16;

use super::*;
use crate::kernel::products::{Numbers, Pairs, Rounded};

/// Values whose products and sums are exact in any order.
fn numbers<N>(count: usize, of: impl Fn(f32) -> N) -> Vec<N> {
    (0..count)
        .map(|index| of((index * 7 % 13) as f32 - 6.0))
        .collect()
}

/// Transposes a matrix of this number of columns.
fn turned<N: Copy>(numbers: &[N], columns: usize) -> Vec<N> {
    let column = |column: usize| numbers[column..].iter().step_by(columns).copied();
    (0..columns).flat_map(column).collect()
}

fn check<P: Products<f32>>(isa: Isa, of: impl Fn(f32) -> P::Number) {
    for [rows, summed, columns] in [
        [1, 1, 1],
        [100, 64, 64],
        [193, 7, 70],
        [5, 3, 200],
        [5, 4803, 6],
        [4500, 5, 18],
    ] {
        let [of_a, of_b, bias] =
            [rows * summed, summed * columns, columns].map(|count| numbers(count, &of));
        let a = Matrix::new(&of_a, [rows, summed]);
        let b = Matrix::new(&of_b, [summed, columns]);
        let product_at = |row: usize, k: usize, column: usize| {
            P::widened(of_a[row * summed + k]) * P::widened(of_b[k * columns + column])
        };
        let expected = |bias: &[P::Number]| -> Vec<f32> {
            let places = (0..rows * columns).map(|index| (index / columns, index % columns));
            let sums = places.map(|(row, column)| {
                let products = (0..summed).map(|k| product_at(row, k, column));
                products.sum::<f32>() + P::widened(bias[column])
            });
            sums.map(|sum| P::widened(P::number(sum))).collect()
        };
        let widened = |y: Buffer<P::Number>| y.iter().map(|y| P::widened(*y)).collect::<Vec<f32>>();
        let y = product::<f32, P>(isa, a, b, Some(&bias));
        assert_eq!(widened(y), expected(&bias));
        let expected = expected(&vec![P::Number::default(); columns]);
        assert_eq!(widened(product::<f32, P>(isa, a, b, None)), expected);
        // The same product with both operands transposed.
        let (turned_a, turned_b) = (turned(&of_a, summed), turned(&of_b, columns));
        let x = Matrix::new(&turned_a, [summed, rows]);
        assert_eq!(widened(product_over_rows::<f32, P>(isa, x, b)), expected);
        let [y, sums] = product_and_sums_over_rows::<f32, P>(isa, x, b);
        assert_eq!(widened(y), expected);
        let of_columns = turned_b.chunks(summed).map(|column| {
            let numbers = column.iter().map(|number| P::widened(*number));
            P::widened(P::number(numbers.sum::<f32>()))
        });
        assert_eq!(widened(sums), of_columns.collect::<Vec<f32>>());
        let turned_b = Matrix::new(&turned_b, [columns, summed]).transposed();
        let y = product::<f32, P>(isa, x.transposed(), turned_b, None);
        assert_eq!(widened(y), expected);
        // SAFETY: all elements are written.
        let y =
            unsafe { Buffer::filled(rows * columns, |y| dots_to::<f32, P>(isa, [a, turned_b], y)) };
        assert_eq!(widened(y), expected);
    }
}

#[test]
fn products_are_exact_for_every_instruction_set() {
    for isa in Isa::available() {
        check::<Numbers>(isa, |number| number);
        // Other instruction sets have no pairs and split them.
        if Pairs::run_on(isa) {
            check::<Pairs>(isa, bf16::from_f32);
        }
    }
}

/// Values with 24 significant bits, of many magnitudes.
fn bits(count: usize, seed: u32) -> Vec<f32> {
    let number = |index: usize| {
        let bits = (index as u32 ^ seed << 20)
            .wrapping_mul(0x9e37_79b1)
            .rotate_left(13);
        let bits = bits.wrapping_mul(0x85eb_ca77) ^ bits >> 15;
        f32::from_bits(bits & 0x83ff_ffff | 0x3c00_0000)
    };
    (0..count).map(number).collect()
}

#[test]
fn products_have_all_bits_of_numbers() {
    // With enough columns for matrices to multiply parts of numbers; one product, and many.
    let (rows, columns) = (37, 70);
    for (isa, summed) in Isa::available()
        .into_iter()
        .flat_map(|isa| [1, 2, 33, 500].map(|summed| (isa, summed)))
    {
        let (a, b) = (bits(rows * summed, 1), bits(summed * columns, 2));
        let of_a = Matrix::new(&a, [rows, summed]);
        let of_b = Matrix::new(&b, [summed, columns]);
        let turned = turned(&a, summed);
        let turned = Matrix::new(&turned, [summed, rows]);
        let found = [
            product::<f32, Numbers>(isa, of_a, of_b, None),
            product::<f32, Numbers>(isa, turned.transposed(), of_b, None),
            product_over_rows::<f32, Numbers>(isa, turned, of_b),
        ];
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |c| (row, c))) {
            let term =
                |k: usize| f64::from(a[row * summed + k]) * f64::from(b[k * columns + column]);
            let exact: f64 = (0..summed).map(term).sum();
            let sizes: f64 = (0..summed).map(|k| term(k).abs()).sum();
            let bound = sizes * f64::from(f32::EPSILON) * (summed as f64).sqrt();
            for found in &found {
                let off = (f64::from(found[row * columns + column]) - exact).abs();
                assert!(
                    off <= bound,
                    "{}, {summed} terms: {off} > {bound}",
                    isa.name()
                );
            }
        }
    }
}

/// NaN with any bits, which rounding could turn into zero.
#[test]
fn a_number_that_is_none_reaches_its_sums() {
    let (rows, summed, columns) = (20, 33, 40);
    for (isa, bits) in Isa::available()
        .into_iter()
        .flat_map(|isa| [0x7fc0_0000, 0x7fff_ffff, u32::MAX].map(|bits| (isa, bits)))
    {
        for place in [0, 7 * summed + 32] {
            let (mut a, b) = (
                numbers(rows * summed, |x| x),
                numbers(summed * columns, |x| x),
            );
            a[place] = f32::from_bits(bits);
            let (of_a, of_b) = (
                Matrix::new(&a, [rows, summed]),
                Matrix::new(&b, [summed, columns]),
            );
            for y in [
                product::<f32, Numbers>(isa, of_a, of_b, None),
                product::<f32, Rounded>(isa, of_a, of_b, None),
            ] {
                for (index, y) in y.iter().enumerate() {
                    let reached = index / columns == place / summed;
                    assert_eq!(y.is_nan(), reached, "{}, {bits:x}, {index}", isa.name());
                }
            }
        }
    }
}
