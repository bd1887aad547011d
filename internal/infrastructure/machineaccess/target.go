package machineaccess

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc/codes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/owner"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
)

// target is a machine, and a connection to its host. Each stream has a connection of its own, so that a slow client does not
// delay the calls of reconcilers.
type target struct {
	hostpb.HostClient
	io.Closer

	machine *infrav1.CapstanMachine
}

var resource = accessapi.GroupVersion.WithResource(accessapi.Resource).GroupResource()

// find connects to the host of a machine. A tenant can write the spec of a CapstanMachine, so the host must confirm that the id
// belongs to a machine of the same namespace and name, and of this management cluster.
func (s *Server) find(ctx context.Context, q request) (_ *target, err error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	machine, host := &infrav1.CapstanMachine{}, &infrav1.CapstanHost{}
	if err := s.Reader.Get(ctx, client.ObjectKey{Namespace: q.namespace, Name: q.name}, machine); err != nil {
		return nil, readError(err, q.name)
	}
	if machine.Spec.ID == "" || machine.Spec.HostName == "" {
		return nil, conflict(q.name, "no host was chosen for the machine yet")
	}
	if err := s.Reader.Get(ctx, client.ObjectKey{Name: machine.Spec.HostName}, host); apierrors.IsNotFound(err) {
		return nil, conflict(q.name, "the CapstanHost %s of the machine does not exist", machine.Spec.HostName)
	} else if err != nil {
		return nil, readError(err, q.name)
	}
	hosts, closer, err := connections.Dial(ctx, s.Reader, host, s.Inbound)
	if err != nil {
		return nil, unreachable(machine, err)
	}
	defer func() {
		if err != nil {
			_ = closer.Close()
		}
	}()
	return &target{HostClient: hosts, Closer: closer, machine: machine}, s.confirm(ctx, hosts, machine)
}

// confirm asks the host whether it has the machine of the object.
func (s *Server) confirm(ctx context.Context, host hostpb.HostClient, machine *infrav1.CapstanMachine) error {
	ours, err := connections.ManagementCluster(ctx, s.Reader)
	if err != nil {
		return readError(err, machine.Name)
	}
	info, err := host.GetInfo(ctx, &hostpb.GetInfoRequest{})
	if err != nil {
		return hostError(machine, err)
	}
	if why := hostselection.Mismatch(machine.Spec.HostName, machine.Spec.HostID, info.GetId()); why != "" {
		return conflict(machine.Name, "%s", why)
	}
	found, err := host.GetMachine(ctx, &hostpb.GetMachineRequest{Id: machine.Spec.ID})
	if err != nil {
		return hostError(machine, err)
	}
	if !owner.Same(found.GetSpec(), machine) {
		return apierrors.NewForbidden(resource, machine.Name, fmt.Errorf("the id of the machine belongs to another machine on its host"))
	}
	if theirs := found.GetStatus().GetManagementCluster(); theirs != "" && theirs != ours {
		return apierrors.NewForbidden(resource, machine.Name, fmt.Errorf("the machine belongs to another management cluster"))
	}
	return nil
}

func conflict(name, format string, args ...any) error {
	return apierrors.NewConflict(resource, name, fmt.Errorf(format, args...))
}

// readError reports that an object was not found, and hides all other errors of the manager.
func readError(err error, name string) error {
	if apierrors.IsNotFound(err) {
		return apierrors.NewNotFound(resource, name)
	}
	return apierrors.NewInternalError(err)
}

func unreachable(machine *infrav1.CapstanMachine, err error) error {
	return apierrors.NewServiceUnavailable(fmt.Sprintf("host %s of machine %s/%s does not answer: %s",
		machine.Spec.HostName, machine.Namespace, machine.Name, connections.Message(err)))
}

// hostError returns the Status for a refused call.
func hostError(machine *infrav1.CapstanMachine, err error) error {
	message := connections.Message(err)
	switch connections.Code(err) {
	case codes.NotFound:
		notFound := apierrors.NewNotFound(resource, machine.Name)
		notFound.ErrStatus.Message = message
		return notFound
	case codes.Internal, codes.Unknown:
		return apierrors.NewInternalError(errors.New(message))
	case codes.InvalidArgument:
		return apierrors.NewBadRequest(message)
	case codes.FailedPrecondition:
		return conflict(machine.Name, "%s", message)
	case codes.Unimplemented:
		return conflict(machine.Name, "capstand of host %s is too old for this request: upgrade it", machine.Spec.HostName)
	case codes.PermissionDenied, codes.AlreadyExists:
		return apierrors.NewForbidden(resource, machine.Name, fmt.Errorf("%s", message))
	}
	return unreachable(machine, err)
}
