package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/wakeup"
)

// LostLinks sends a value whenever a link of a machine, its cable or its bridge, is missing: at the start, and when a
// program on the box deletes it. The channel is closed when ctx is done.
func LostLinks(ctx context.Context, log *slog.Logger, bridge, machineID string) <-chan struct{} {
	lost := wakeup.New()
	names := []string{bridge, VethName(machineID)}
	go func() {
		defer close(lost)
		for ctx.Err() == nil {
			err := followLinks(ctx, names, lost)
			if ctx.Err() != nil {
				return
			}
			log.Error("Cannot watch the network links of the machine", "error", err)
			rest(ctx, guardPause)
		}
	}()
	return lost
}

func followLinks(ctx context.Context, names []string, lost wakeup.Signal) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	updates := make(chan netlink.LinkUpdate)
	if err := netlink.LinkSubscribe(updates, ctx.Done()); err != nil {
		return fmt.Errorf("subscribing to changes of links: %w", err)
	}
	for _, name := range names {
		if _, err := netlink.LinkByName(name); isNoLink(err) {
			lost.Send()
		}
	}
	for update := range updates {
		if update.Header.Type == unix.RTM_DELLINK && slices.Contains(names, update.Attrs().Name) {
			lost.Send()
		}
	}
	return errors.New("the subscription to changes of links has ended")
}
