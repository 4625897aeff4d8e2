//! Measures the time until a pool is usable, and until all its pages are present.
//!
//! ```text
//! cargo xtask bench prefault [threads] [GiB]
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use lmc_memory::{ArenaConfig, Demand, Prefault};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(2), |text| text.parse())?;
    let gib: usize = args.next().map_or(Ok(4), |text| text.parse())?;
    let name = format!("lmc_prefault_{}", std::process::id());
    for (label, config) in [
        ("anonymous", ArenaConfig::anonymous(gib << 30)),
        (
            "anonymous, huge",
            ArenaConfig::anonymous(gib << 30).with_huge_pages(Demand::Auto),
        ),
        ("shared", ArenaConfig::shared(name, gib << 30)),
    ] {
        let start = Instant::now();
        let arena = config
            .with_prefault(Prefault::Background { threads })
            .build()?;
        let usable = start.elapsed();
        let progress = loop {
            let progress = arena.prefault_progress();
            if progress.done == progress.total || progress.error.is_some() {
                break progress;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{label:<16} {gib} GiB, {threads} threads: usable after {usable:.1?}, present after \
             {seconds:.2} s ({:.2} GB/s){}",
            progress.done as f64 / seconds / 1e9,
            progress
                .error
                .map(|error| format!(": {error}"))
                .unwrap_or_default()
        );
        for note in &arena.report().notes {
            println!("  {note}");
        }
    }
    Ok(())
}
