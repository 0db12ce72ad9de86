//! Work of rank 0 alone.

use halocline_core::{Error, Result, World};

/// Calls a function on rank 0, whose error all ranks return. The other ranks wait.
///
/// # Errors
/// The error of the function; a failure of communication.
pub(crate) fn on_root(world: &World, function: impl FnOnce() -> Result<()>) -> Result<()> {
    let done = if world.is_root() { function() } else { Ok(()) };
    let message = done.as_ref().err().map(ToString::to_string);
    let bytes = serde_json::to_vec(&message).map_err(Error::other)?;
    let sent = world.broadcast_bytes(0, world.is_root().then_some(bytes));
    done?;
    let message: Option<String> = serde_json::from_slice(&sent?).map_err(Error::other)?;
    message.map_or(Ok(()), |message| Err(Error::other(message)))
}

#[cfg(test)]
mod tests {
    use halocline_core::Launcher;

    use super::*;

    #[test]
    fn an_error_of_rank_0_is_that_of_all_ranks() {
        let run = Launcher::local(3).run(|world| {
            on_root(&world, || Ok(()))?;
            let failed = on_root(&world, || Err(Error::other("no folder")));
            assert_eq!(failed.unwrap_err().to_string(), "no folder");
            Ok(())
        });
        run.unwrap();
    }
}
