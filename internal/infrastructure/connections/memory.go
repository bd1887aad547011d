package connections

import (
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec of messages
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"capstan.dev/capstan/internal/host/hostpb"
)

const (
	// structBytes and headerBytes are the memory of a message and of a text without their content. On the wire, both have two bytes.
	structBytes, headerBytes = 256, 32
	// maxGrowth bounds the memory of a received message, as a multiple of the bytes that it may have on the wire. A description of a machine
	// needs about five times its bytes, but has far fewer of them than it may have.
	maxGrowth = 4
)

// memory estimates the memory of a message; 0 for nil.
func memory(m proto.Message) int {
	if !m.ProtoReflect().IsValid() {
		return 0
	}
	wire, _ := proto.Marshal(m) // It was received, so it can be sent.
	return memoryOnceRead(wire, m.ProtoReflect().Descriptor())
}

// memoryOnceRead estimates the memory of a message before it is read.
func memoryOnceRead(wire []byte, d protoreflect.MessageDescriptor) int {
	sum := structBytes
	for len(wire) > 0 {
		number, kind, tag := protowire.ConsumeTag(wire)
		size := protowire.ConsumeFieldValue(number, kind, wire[max(tag, 0):])
		if tag < 0 || size < 0 {
			return sum // It cannot be read.
		}
		value, field := wire[tag:tag+size], d.Fields().ByNumber(number)
		wire = wire[tag+size:]
		if content, n := protowire.ConsumeBytes(value); kind == protowire.BytesType && n >= 0 {
			if field != nil && field.Message() != nil {
				sum += memoryOnceRead(content, field.Message())
				continue
			}
			sum += headerBytes + len(content)
		}
	}
	return sum
}

// maxReceivedBytes returns the bound of an answer. Only the lists of a whole host can have more than 1 MiB.
func maxReceivedBytes(answer any) int {
	switch answer.(type) {
	case *hostpb.ListMachinesResponse, *hostpb.ListServicesResponse:
		return maxMessageBytes
	}
	return maxAnswerBytes
}

// frugal is the codec of messages. It reads none that would occupy too much memory.
type frugal struct{ encoding.CodecV2 }

func (f frugal) Unmarshal(data mem.BufferSlice, into any) error {
	if m, ok := into.(proto.Message); ok {
		wire := data.MaterializeToBuffer(mem.DefaultBufferPool())
		defer wire.Free()
		if most := maxGrowth * maxReceivedBytes(into); memoryOnceRead(wire.ReadOnlyData(), m.ProtoReflect().Descriptor()) > most {
			return fmt.Errorf("expected a message of the host that occupies at most %d MiB of memory, found a larger one", most>>20)
		}
	}
	return f.CodecV2.Unmarshal(data, into)
}

// frugally is the option of calls whose answers are read with the codec.
func frugally() grpc.CallOption { return grpc.ForceCodecV2(frugal{encoding.GetCodecV2("proto")}) }
