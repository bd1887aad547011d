package measure

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Capstan is the capstan command of a build, for a separate management plane.
type Capstan struct {
	bin, root string
	temporary bool
}

// Up starts a management plane below the root folder, or below a temporary one if root is empty. The caller must call
// Down, also after an interruption. args are further arguments of `capstan up`.
func Up(ctx context.Context, bin, root string, args ...string) (*Capstan, error) {
	c := &Capstan{bin: bin, root: root, temporary: root == ""}
	if c.temporary {
		var err error
		if c.root, err = os.MkdirTemp("", "capstan-bench-"); err != nil {
			return nil, err
		}
	}
	if _, err := c.Run(ctx, append([]string{"up"}, args...)...); err != nil {
		return nil, errors.Join(fmt.Errorf("capstan up: %w", err), c.Down(ctx))
	}
	return c, nil
}

// Root returns the root folder of the management plane.
func (c *Capstan) Root() string { return c.root }

// Run runs a command and returns its output.
func (c *Capstan) Run(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "capstan"), append(args, "--root", c.root)...)
	cmd.Stderr = os.Stderr
	return cmd.Output()
}

// Down takes the plane down, also when ctx has ended.
func (c *Capstan) Down(ctx context.Context) error {
	_, err := c.Run(context.WithoutCancel(ctx), "down", "--yes")
	if c.temporary {
		err = errors.Join(err, os.RemoveAll(c.root))
	}
	return err
}
