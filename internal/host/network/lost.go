package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// LostLinks sends a value whenever a link of a machine, its cable or its bridge, is missing: at the start, and when a
// program on the box deletes it. The channel is closed when ctx is done.
func LostLinks(ctx context.Context, log *slog.Logger, networkID, machineID string) <-chan struct{} {
	lost := make(chan struct{}, 1)
	names := []string{BridgeName(networkID), VethName(machineID)}
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

func followLinks(ctx context.Context, names []string, lost chan<- struct{}) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	updates := make(chan netlink.LinkUpdate)
	if err := netlink.LinkSubscribe(updates, ctx.Done()); err != nil {
		return fmt.Errorf("subscribing to changes of links: %w", err)
	}
	send := func() {
		select {
		case lost <- struct{}{}:
		default: // The reader has not received the previous value yet.
		}
	}
	for _, name := range names {
		if _, err := netlink.LinkByName(name); isNoLink(err) {
			send()
		}
	}
	for update := range updates {
		if update.Header.Type == unix.RTM_DELLINK && slices.Contains(names, update.Attrs().Name) {
			send()
		}
	}
	return errors.New("the subscription to changes of links has ended")
}
