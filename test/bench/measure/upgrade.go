package measure

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"capstan.dev/capstan/test/bench/floor"
	"capstan.dev/capstan/test/plane"
	"capstan.dev/capstan/test/versions"
)

// Upgrade is the common part of measurements of upgrades.
type Upgrade struct {
	*plane.Plane
	// Floor is the time of etcd and an API server of the newer version from empty folders to /readyz.
	Floor time.Duration
	// From is the built version of the minor before the newer version.
	From string
}

// UpUpgrade measures and prints the floor, and then starts a separate management plane. The caller must call Down, also after an
// interruption.
func UpUpgrade(ctx context.Context, bin, to string) (*Upgrade, error) {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return nil, err
	}
	u := &Upgrade{}
	if u.Floor, err = floor.Measure(ctx, filepath.Join(bin, "kubernetes", to)); err != nil {
		return nil, fmt.Errorf("floor: %w", err)
	}
	fmt.Printf("floor: etcd and API server from empty folders to /readyz: %.2f s\n\n", u.Floor.Seconds())
	if u.From, err = versions.FormerMinor(bin, to); err != nil {
		return nil, err
	}
	u.Plane, err = Up(ctx, bin, "")
	return u, err
}
