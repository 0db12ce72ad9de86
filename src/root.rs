//! Work of rank 0 alone.

use halocline_core::{Error, Result, World};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Calls a function on rank 0, whose value or error all ranks return. The other ranks wait.
///
/// # Errors
/// The error of the function; a failure of communication.
pub(crate) fn on_root<T: Serialize + DeserializeOwned>(
    world: &World,
    function: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let done = world.is_root().then(function);
    let bytes = done.as_ref().map(|done| {
        let told = done.as_ref().map_err(ToString::to_string);
        serde_json::to_vec(&told).map_err(Error::other)
    });
    let sent = world.broadcast_bytes(0, bytes.transpose()?);
    if let Some(done) = done {
        let value = done?;
        return sent.map(|_| value);
    }
    let told: std::result::Result<T, String> =
        serde_json::from_slice(&sent?).map_err(Error::other)?;
    told.map_err(Error::other)
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;

    use super::*;

    #[test]
    fn values_and_errors_of_rank_0_are_those_of_all_ranks() {
        let run = Launcher::local(3).run(|world| {
            let ranks = on_root(&world, || Ok(vec![world.rank()]))?;
            assert_eq!(ranks, [0]);
            let failed = on_root(&world, || Err::<(), _>(Error::other("no folder")));
            assert_eq!(failed.unwrap_err().to_string(), "no folder");
            Ok(())
        });
        run.unwrap();
    }
}
