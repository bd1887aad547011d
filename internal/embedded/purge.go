package embedded

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
)

// DialHost connects to a capstand of this box. The folder of the socket limits access to it.
func DialHost(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// inventoryOf lists the objects of a host by id, with their owners.
type inventoryOf struct{ machines, balancers, networks map[string]owner.Object }

// purgeHost removes every machine, load balancer and network of a host, and returns when they are gone. It calls step with the cause if a
// machine cannot be removed: capstand tries again until the user ends the command.
func purgeHost(ctx context.Context, l Layout, name string, step func(string)) error {
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
	hindered := hindrances{}
	have := inventoryOf{map[string]owner.Object{}, map[string]owner.Object{}, map[string]owner.Object{}}
	for synced := false; !synced || len(have.machines) > 0 || len(have.balancers) > 0; {
		event, err := events.Recv()
		if errors.Is(err, io.EOF) {
			return errors.New("expected capstand to remove all machines, and it ended: repeat `capstan down`")
		}
		if err != nil {
			return err
		}
		have.observe(event)
		if cause := hindered.news(event); cause != "" {
			step(cause)
		}
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
		of := have.networks[id]
		if _, err := host.DeleteNetwork(ctx, &hostpb.DeleteNetworkRequest{Id: id, Namespace: of.GetNamespace(), Name: of.GetName()}); err != nil {
			return fmt.Errorf("cannot remove network %s: %w", id, err)
		}
	}
	return nil
}

// hindrances are the messages of the machines that are being removed, by id.
type hindrances map[string]string

// news returns the new cause why a machine is not removed yet, or nothing.
func (h hindrances) news(event *hostpb.Event) string {
	m := event.GetMachine()
	id, message := m.GetSpec().GetId(), m.GetStatus().GetMessage()
	if m.GetStatus().GetPhase() != hostpb.MachineStatus_DELETING || message == "" || h[id] == message {
		return ""
	}
	h[id] = message
	return fmt.Sprintf("machine %s/%s still exists: %s", m.GetSpec().GetNamespace(), m.GetSpec().GetName(), message)
}

// observe updates the inventory.
func (h inventoryOf) observe(event *hostpb.Event) {
	gone := event.Type == hostpb.Event_DELETED
	if m := event.GetMachine().GetSpec(); m != nil {
		set(h.machines, m.GetId(), m, gone)
		set(h.networks, m.GetNetwork().GetId(), m.GetNetwork(), false)
	}
	if b := event.GetLoadBalancer(); b != nil {
		set(h.balancers, b.GetId(), b, gone)
	}
}

// recordedNetworks adds the networks without machines. Watch does not report them; the folder of capstand contains them.
func (h inventoryOf) recordedNetworks(hostRoot string) error {
	entries, err := os.ReadDir(filepath.Join(hostRoot, "networks"))
	if err != nil {
		return atomicfile.IgnoreMissing(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(hostRoot, "networks", e.Name(), "spec.json"))
		if atomicfile.IgnoreMissing(err) != nil {
			return err
		}
		n := &hostpb.Network{}
		if err != nil || (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, n) != nil {
			continue // It was removed in the meantime, or capstand cannot read it either.
		}
		set(h.networks, n.GetId(), n, false)
	}
	return nil
}

func set(ids map[string]owner.Object, id string, of owner.Object, gone bool) {
	if gone {
		delete(ids, id)
	} else if id != "" {
		ids[id] = of
	}
}

func deleteAll(ctx context.Context, host hostpb.HostClient, have inventoryOf) error {
	// At the same time: the pods of each machine have some seconds to stop.
	machines, deleting := errgroup.WithContext(ctx)
	for id, of := range have.machines {
		machines.Go(func() error {
			if _, err := host.DeleteMachine(deleting, &hostpb.DeleteMachineRequest{Id: id, Namespace: of.GetNamespace(), Name: of.GetName()}); err != nil {
				return fmt.Errorf("cannot remove machine %s: %w", id, err)
			}
			return nil
		})
	}
	if err := machines.Wait(); err != nil {
		return err
	}
	for _, id := range slices.Sorted(maps.Keys(have.balancers)) {
		of := have.balancers[id]
		if _, err := host.DeleteLoadBalancer(ctx, &hostpb.DeleteLoadBalancerRequest{Id: id, Namespace: of.GetNamespace(), Name: of.GetName()}); err != nil {
			return fmt.Errorf("cannot remove load balancer %s: %w", id, err)
		}
	}
	return nil
}
