//! Coefficients of the vector functions in `math`.

/// Coefficients, lowest power first, and limits.
#[derive(Debug)]
pub(crate) struct Constants<E: 'static> {
    /// Adding this rounds to integers: `1.5 · 2ᵐ`, with `m` the bits of the mantissa.
    pub(super) round: E,
    pub(super) log2_e: E,
    /// Leading bits of ln 2, few enough for exact products with exponents, and the rest.
    pub(super) ln_2: [E; 2],
    /// `(e^r - 1 - r) / r²` for `|r| ≤ ln 2 / 2`.
    pub(super) exp: &'static [E],
    /// Numerator and denominator of `G(u)`.
    pub(super) normal: [&'static [E]; 2],
    /// Cutoffs of the tails of both distributions, where they approach the smallest normal number.
    pub(super) ends: [E; 2],
    /// `1 / √(2π)`.
    pub(super) density: E,
    pub(super) half: E,
    pub(super) one: E,
}

#[allow(clippy::excessive_precision, reason = "the digits of the fit")]
pub(super) const F32: Constants<f32> = Constants {
    round: 12_582_912.0,
    log2_e: std::f32::consts::LOG2_E,
    ln_2: [0.693_359_375, -2.121_944_400_546_905_8e-4],
    exp: &[
        0.5,
        0.166_665_766_661,
        0.041_666_554_213,
        0.008_363_232_883_7,
        0.001_392_625_083_15,
    ],
    normal: [
        &[
            0.797_884_528_484_4,
            0.395_807_131_901_8,
            0.101_794_574_500_5,
            0.011_381_774_919_4,
        ],
        &[
            1.0,
            0.951_497_743_386_1,
            0.424_324_253_383_7,
            0.101_416_788_951_0,
            0.011_392_241_230_2,
        ],
    ],
    ends: [12.94, 87.3],
    density: 0.398_942_280_401_432_7,
    half: 0.5,
    one: 1.0,
};

#[allow(clippy::excessive_precision, reason = "the digits of the fit")]
pub(super) const F64: Constants<f64> = Constants {
    round: 6_755_399_441_055_744.0,
    log2_e: std::f64::consts::LOG2_E,
    ln_2: [6.931_471_803_691_238_2e-1, 1.908_214_929_270_587_7e-10],
    exp: &[
        0.500_000_000_000_000_103,
        0.166_666_666_666_666_675,
        0.041_666_666_666_623_820_5,
        0.008_333_333_333_330_038_2,
        0.001_388_888_891_736_708_06,
        1.984_126_986_317_155_6e-4,
        2.480_152_105_786_820_52e-5,
        2.755_726_827_690_569_62e-6,
        2.762_020_159_103_154_88e-7,
        2.510_047_250_569_499_6e-8,
    ],
    normal: [
        &[
            0.797_884_560_802_865_520_2,
            0.903_865_127_344_920_234_2,
            0.524_840_841_995_667_403_6,
            0.195_951_100_429_122_704_8,
            0.050_654_886_469_007_223_7,
            9.219_881_751_452_216_438e-3,
            1.152_956_130_428_736_116e-3,
            9.102_265_385_792_532_205e-5,
            3.520_603_704_254_488_93e-6,
        ],
        &[
            1.0,
            1.588_256_518_840_537_062,
            1.244_509_668_513_983_942,
            0.619_361_504_696_670_988_5,
            0.213_845_935_065_232_159_8,
            0.052_939_617_878_255_579_2,
            9.401_929_020_219_713_48e-3,
            1.159_997_292_528_063_917e-3,
            9.102_265_448_228_454_479e-5,
            3.520_603_700_420_880_847e-6,
        ],
    ],
    ends: [37.5, 708.3],
    density: 0.398_942_280_401_432_7,
    half: 0.5,
    one: 1.0,
};
