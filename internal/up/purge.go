package up

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"capstan.dev/capstan/internal/host/hostpb"
)

// DialHost connects to a capstand of this box. Who may is decided by the folder of the socket.
func DialHost(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// inventoryOf is what a host holds, by id.
type inventoryOf struct{ machines, balancers, networks map[string]bool }

// purgeHost removes every machine, load balancer and network of a host, and returns when they are gone.
func purgeHost(ctx context.Context, l Layout, name string) error {
	conn, err := DialHost(l.HostSocket(name))
	if err != nil {
		return err
	}
	defer conn.Close()
	host := hostpb.NewHostClient(conn)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, err := host.Watch(ctx, &hostpb.WatchRequest{})
	if err != nil {
		return err
	}
	have := inventoryOf{map[string]bool{}, map[string]bool{}, map[string]bool{}}
	for synced := false; !synced || len(have.machines) > 0 || len(have.balancers) > 0; {
		event, err := events.Recv()
		if errors.Is(err, io.EOF) {
			return errors.New("wanted capstand to remove everything, and it ended; repeat `capstan down`")
		}
		if err != nil {
			return err
		}
		have.observe(event)
		if event.Type == hostpb.Event_SYNCED {
			synced = true
			if err := deleteAll(ctx, host, have); err != nil {
				return err
			}
		}
	}
	if err := have.recordedNetworks(l.HostRoot(name)); err != nil {
		return err
	}
	for _, id := range slices.Sorted(maps.Keys(have.networks)) {
		if _, err := host.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: id}); err != nil {
			return fmt.Errorf("cannot remove network %s: %w", id, err)
		}
	}
	return nil
}

// observe keeps the inventory up to date.
func (h inventoryOf) observe(event *hostpb.Event) {
	gone := event.Type == hostpb.Event_DELETED
	if m := event.GetMachine(); m != nil {
		set(h.machines, m.GetSpec().GetId(), gone)
		set(h.networks, m.GetSpec().GetNetwork().GetId(), false)
	}
	if b := event.GetLoadBalancer(); b != nil {
		set(h.balancers, b.GetId(), gone)
		set(h.networks, b.GetNetworkId(), false)
	}
}

// recordedNetworks adds the networks that nothing uses: Watch does not tell of them, capstand's
// folder does.
func (h inventoryOf) recordedNetworks(hostRoot string) error {
	entries, err := os.ReadDir(filepath.Join(hostRoot, "networks"))
	for _, e := range entries {
		h.networks[e.Name()] = true
	}
	return ignoreMissing(err)
}

func set(ids map[string]bool, id string, gone bool) {
	if gone {
		delete(ids, id)
	} else if id != "" {
		ids[id] = true
	}
}

func deleteAll(ctx context.Context, host hostpb.HostClient, have inventoryOf) error {
	for _, id := range slices.Sorted(maps.Keys(have.machines)) {
		if _, err := host.DeleteMachine(ctx, &hostpb.DeleteMachineRequest{Id: id}); err != nil {
			return fmt.Errorf("cannot remove machine %s: %w", id, err)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(have.balancers)) {
		if _, err := host.DeleteLoadBalancer(ctx, &hostpb.DeleteLoadBalancerRequest{Id: id}); err != nil {
			return fmt.Errorf("cannot remove load balancer %s: %w", id, err)
		}
	}
	return nil
}
