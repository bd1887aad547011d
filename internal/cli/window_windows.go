package cli

import "os"

// windowChanges reports nothing: Windows has no signal for it.
func windowChanges() <-chan os.Signal { return nil }
